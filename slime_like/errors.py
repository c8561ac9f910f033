"""Errors shown to users.

Each can be constructed from a single message, so that Ray can pickle it. The message about a bad input names the key or
file, the value and a fix.
"""

import sys

from slime_like.printable import complaint


class SlimeLikeError(Exception):
    """Base class of the errors that a user may see."""

    printed = False

    def say(self) -> None:
        """Print the error, unless it has been printed already: a run prints its error before it stops its processes."""
        if not self.printed:
            self.printed = True
            sys.stderr.write(complaint(self))
            sys.stderr.flush()


class ConfigError(SlimeLikeError, ValueError):
    """A configuration key, flag or layout that cannot work; raised before any process starts, where possible."""


class MissingResources(ConfigError):
    """Nodes or GPUs that a Ray cluster lacks at the moment; they may be added or become free."""


class DataError(SlimeLikeError, ValueError):
    """Data that cannot be used: a dataset, a row, a rollout without samples to train on, a run's folder or a job's id."""


class CheckpointError(SlimeLikeError, RuntimeError):
    """A checkpoint or Hugging Face model that is missing, corrupt, unsuitable or from another model, or cannot be written."""


class RewardError(SlimeLikeError, RuntimeError):
    """A reward function that cannot be imported, fails or returns something other than a finite number.

    Also raised for a reward server with a wrong address or an invalid answer, and for an invalid reward from
    ``rollout.generate`` or ``rollout.agent``. A call that takes too long or whose process is killed raises no error, nor does
    a server that fails: their samples get ``reward.fallback``.
    """


class UserCodeError(SlimeLikeError, RuntimeError):
    """User code, such as a generate function, loss or filter, that raised or returned an unusable value."""


class AgentError(SlimeLikeError, RuntimeError):
    """An agent that fails many times in a row, or returns something other than a reward or None."""


class StoreFull(SlimeLikeError, MemoryError):
    """Samples that do not fit into a ``SampleStore``: they would exceed its limit of tokens, or memory is short."""


class EngineError(SlimeLikeError, RuntimeError):
    """An SGLang engine that did not start, died, or refused a request or answered it wrongly.

    Also raised for samples that cannot be used for training.
    """


class EngineLost(EngineError):
    """An engine that is unreachable, because it died, was killed or its connection broke, or that the pool no longer uses.

    Also raised if no remaining engine has the current weights.
    """


class EngineNodeLost(EngineError):
    """A multi-node engine with a node that cannot run its processes; the engine can be started on other nodes."""


class WeightSyncError(SlimeLikeError, RuntimeError):
    """A push of weights that cannot be sent, or that did not arrive completely in every engine."""


class ConsistencyError(SlimeLikeError, RuntimeError):
    """A wrong weight version after a push, or engine and trainer that disagree on log-probabilities or experts of tokens."""


class WorkerError(SlimeLikeError, RuntimeError):
    """A trainer rank, another process of the run or a job server that failed; ``died``: it exited or its node was lost."""

    def __init__(self, message: str, died: bool = False) -> None:
        super().__init__(message)
        self.died = died


class ProcessLost(SlimeLikeError, RuntimeError):
    """The driver, a Ray process or another process of the run that died or was stopped, or an unreachable job server.

    To resume a run that ended with this error, run the same command again.
    """


class DeadlineExceeded(SlimeLikeError, TimeoutError):
    """A wait that exceeded its limit; the message says what did not happen in time."""


class RunComplete(SlimeLikeError):
    """The run folder already holds the configured number of trained rollouts. Not a failure."""


class CollectiveError(SlimeLikeError, RuntimeError):
    """A collective that failed or was refused, communicators that cannot be released or rebuilt, or a wrapper of
    collectives that cannot be removed.

    The message about a failed collective names the op, its group, the phase and the ranks.
    """


class MemoryShortage(SlimeLikeError, RuntimeError):
    """Free memory below ``guard.threshold``, or about to fall below it, before a collective under ``guard.action=raise``.

    With ``guard.symmetric``, the other ranks of the role then raise it too, before their next op.
    """


def exit_code(error: BaseException | None) -> int:
    """Return the exit code for ``error``: 0 completed, 2 config, dataset or checkpoint error, 130 interrupted, 1 other."""
    match error:
        case None | RunComplete():
            return 0
        case KeyboardInterrupt():
            return 130
        case ConfigError() | DataError() | CheckpointError():
            return 2
        case _:
            return 1
