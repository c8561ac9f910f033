"""Errors a user can meet. Each takes one message (so that it pickles across Ray) naming key or file, value and fix."""


class SlimeLikeError(Exception):
    """Base of every error this project raises on purpose."""


class ConfigError(SlimeLikeError, ValueError):
    """A configuration key, flag or layout that cannot work; raised before any process starts."""


class DataError(SlimeLikeError, ValueError):
    """A dataset that is missing or empty, or a row that cannot be used."""


class CheckpointError(SlimeLikeError, RuntimeError):
    """A checkpoint that is missing, corrupt or of another model."""


class RewardError(SlimeLikeError, RuntimeError):
    """A reward function that failed, timed out or returned something that is not a finite number."""


class AgentError(SlimeLikeError, RuntimeError):
    """An agent that fails every time, or returns something that is no reward."""


class EngineError(SlimeLikeError, RuntimeError):
    """An SGLang engine that did not start, died or refused a request."""


class EngineLost(EngineError):
    """An engine that cannot be reached any more: it died, was killed, or its connection broke."""


class WeightSyncError(SlimeLikeError, RuntimeError):
    """Weights that did not arrive whole in every engine."""


class ConsistencyError(SlimeLikeError, RuntimeError):
    """Engine and trainer disagree about the log-probability of the same tokens under the same weights."""


class WorkerError(SlimeLikeError, RuntimeError):
    """A trainer rank or another process of the run failed; ``died``: it is gone."""

    def __init__(self, message: str, died: bool = False) -> None:
        super().__init__(message)
        self.died = died


class DeadlineExceeded(SlimeLikeError, TimeoutError):
    """A wait that took longer than its owner allowed; the message says who waited for whom."""


class RunComplete(SlimeLikeError):
    """Nothing is left to do: the run folder holds as many trained rollouts as were asked for. Not a failure."""


class CollectiveError(SlimeLikeError, RuntimeError):
    """A collective that failed or that a rank did not take part in; the message says which, where, and who."""


class MemoryShortage(SlimeLikeError, RuntimeError):
    """Less free memory than ``guard.threshold`` before a collective, under ``guard.action=raise``."""
