"""Save and resume of one rank of a trained role."""

from __future__ import annotations

from abc import ABC, abstractmethod
from pathlib import Path
from typing import TYPE_CHECKING

from slime_like.checkpoint.files import latest_iteration, name_latest
from slime_like.distributed.wrapper import install

if TYPE_CHECKING:
    from slime_like.train.megatron.weights.checkpoint import Parts, PendingSave


class CheckpointedRank(ABC):
    """A rank with a model and an optimizer. Methods are collective over the ranks of its role."""

    def __init__(self, deadline_s: float) -> None:
        self.version = 0  # rollouts trained on
        self.deadline_s = deadline_s
        self._pending: PendingSave | None = None

    @abstractmethod
    def parts(self) -> Parts:
        """Return the objects that its checkpoints hold."""

    def begin_save(self, folder: Path, iteration: int) -> None:
        """Take a snapshot and start to write ``folder/iter_<iteration>``; training may continue."""
        from slime_like.train.megatron.weights import checkpoint

        assert self._pending is None, "finish_save comes first"
        with install.phase("save"):
            self._pending = checkpoint.begin(self.parts(), folder, iteration, self.version)

    def finish_save(self, *, wait: bool) -> bool:
        """Return True if the pending checkpoint is complete; without ``wait``, False while a rank still writes.

        Raises ``CheckpointError`` on every rank if a rank could not write its part.
        """
        pending = self._pending
        if pending is None:
            return True
        with install.phase("save"):
            if wait or pending.is_written():
                self._pending = None
                pending.finish(self.deadline_s)
        return self._pending is None

    def save(self, folder: Path, iteration: int) -> None:
        """Write a checkpoint and name it the latest of ``folder``: for ranks without a driver."""
        from slime_like.train.megatron.platform.collective import on_rank_zero

        self.begin_save(folder, iteration)
        self.finish_save(wait=True)
        on_rank_zero(lambda: name_latest(folder, iteration))

    def load(self, folder: Path, iteration: int | None = None) -> int:
        """Restore an iteration of ``folder`` (None: the latest), of any layout. Returns the iteration.

        Raises ``CheckpointError`` if it is missing, torn, of another model, or of an incompatible layout.
        """
        from slime_like.train.megatron.weights import checkpoint

        chosen = latest_iteration(folder) if iteration is None else iteration
        with install.phase("load"):
            self.version = checkpoint.load(self.parts(), folder, chosen)
        return chosen
