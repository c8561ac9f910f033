"""Errors a user can meet. Each takes one message (so that it pickles across Ray) naming key or file, value and fix."""

import sys

from slime_like.printable import complaint


class SlimeLikeError(Exception):
    """Base of every error this project raises on purpose."""

    said = False

    def say(self) -> None:
        """Print the error, once: a run prints it before it takes its processes down, its caller at the end."""
        if not self.said:
            self.said = True
            sys.stderr.write(complaint(self))
            sys.stderr.flush()


class ConfigError(SlimeLikeError, ValueError):
    """A configuration key, flag or layout that cannot work; raised before any process starts."""


class DataError(SlimeLikeError, ValueError):
    """A dataset that is missing or empty, or a row that cannot be used."""


class CheckpointError(SlimeLikeError, RuntimeError):
    """A checkpoint that is missing, corrupt or of another model."""


class RewardError(SlimeLikeError, RuntimeError):
    """A reward function that failed, timed out or returned something that is not a finite number."""


class UserCodeError(SlimeLikeError, RuntimeError):
    """A generate function, filter or data source of the user's that raised, or returned something unusable."""


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


class ProcessLost(SlimeLikeError, RuntimeError):
    """The driver or a process of Ray that died or was stopped: the run is over, and the same command continues it."""


class DeadlineExceeded(SlimeLikeError, TimeoutError):
    """A wait that took longer than its owner allowed; the message says who waited for whom."""


class RunComplete(SlimeLikeError):
    """Nothing is left to do: the run folder holds as many trained rollouts as were asked for. Not a failure."""


class CollectiveError(SlimeLikeError, RuntimeError):
    """A collective that failed or that a rank did not take part in; the message says which, where, and who."""


class MemoryShortage(SlimeLikeError, RuntimeError):
    """Less free memory than ``guard.threshold`` before a collective, under ``guard.action=raise``."""


def exit_code(error: BaseException | None) -> int:
    """Exit code of a run: 0 done, 1 it failed, 2 its configuration or files are wrong, 130 stopped before its end."""
    match error:
        case None | RunComplete():
            return 0
        case KeyboardInterrupt():
            return 130
        case ConfigError() | DataError() | CheckpointError():
            return 2
        case _:
            return 1
