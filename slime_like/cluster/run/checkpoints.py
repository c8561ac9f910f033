"""Checkpoints of a run: consistent snapshots, written during training and marked as the latest once complete."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from slime_like.checkpoint.files import SCRATCH, begin_first, iteration_folder, name_latest, prune, remove_scratch
from slime_like.checkpoint.record import add_run
from slime_like.cluster.run.rollouts import RolloutSource
from slime_like.config.schema.run import RunConfig
from slime_like.errors import CheckpointError
from slime_like.interfaces import Trainer
from slime_like.printable import visible

NONE = -1


@dataclass(slots=True)
class Checkpoints:
    """Checkpoints of a run. ``save`` begins one, and ``poll`` marks it as the latest once it is complete."""

    folder: Path
    trainer: Trainer
    rollout: RolloutSource
    config: RunConfig
    enabled: bool  # a run without a trainer has nothing to save
    last: int  # newest iteration that needs no save: resumed, begun or written
    run: Mapping[str, Any] = field(default_factory=dict[str, Any])  # ``run_record``, stored in each checkpoint
    _pending: int | None = field(default=None)

    def save(self, num_trained: int, *, final: bool = False, wait: bool = False) -> bool:
        """Save a checkpoint after ``num_trained`` rollouts, unless that iteration is already saved or being saved.

        The rollout files are written first, the file that names the latest checkpoint last. The call waits for the
        previous save to complete; if ``wait`` or ``final``, or with ``run.async_save=false``, it waits for this one too.
        Return True if the checkpoint is complete; if not ``enabled``, do nothing and return False. Raises
        ``CheckpointError`` if this or the previous save failed. With ``run.on_failed_save=continue``, a failure only
        causes a warning, unless it is a failure of this save and this save is ``final``.
        """
        if not self.enabled:
            return False
        try:
            self._finish()
        except CheckpointError as error:  # of the previous save, which is not the last one, as this one follows
            self._report_failure(error, final=False)
        try:
            if num_trained != self.last:
                self.last = num_trained
                with _named_disk_errors("no checkpoint was started"):
                    begin_first(self.folder)
                self.rollout.save(self.folder, num_trained)
                self.trainer.begin_save(self.folder, num_trained)
                self._pending = num_trained
            if final or wait or not self.config.async_save:
                self._finish()
        except CheckpointError as error:
            self._report_failure(error, final=final)
        return self.last == num_trained and self._pending is None

    def poll(self) -> None:
        """Mark the pending checkpoint as the latest if it is complete.

        Raises ``CheckpointError`` if its save failed; with ``run.on_failed_save=continue``, this is only a warning.
        """
        if self._pending is None:
            return
        try:
            self._finish(wait=False)
        except CheckpointError as error:
            self._report_failure(error, final=False)

    def _finish(self, *, wait: bool = True) -> None:
        iteration = self._pending
        if iteration is None:
            return
        self._pending = None  # even if finishing fails: it is not retried
        if not self.trainer.finish_save(wait=wait):
            self._pending = iteration
            return
        name_latest_checked(self.folder, iteration, self.run)
        if self.config.keep_checkpoints is not None:
            try:
                prune(self.folder, self.config.keep_checkpoints)
            except OSError as error:  # no reason to end a run whose newest checkpoint is complete
                text = f"warning: {error.filename}: an old checkpoint could not be removed ({error.strerror})\n"
                sys.stderr.write(visible(text))

    def _report_failure(self, error: CheckpointError, *, final: bool) -> None:
        self.last = NONE  # so that the next save is not skipped
        if final or self.config.on_failed_save == "stop":
            raise error
        sys.stderr.write(visible(f"warning: {error}; the run continues (run.on_failed_save=continue)\n"))


def name_latest_checked(folder: Path, iteration: int, run: Mapping[str, Any]) -> None:
    """Add ``run`` to the checkpoint's record, then mark the checkpoint as the latest.

    Raises ``CheckpointError`` if a file cannot be written, as on a full disk.
    """
    with _named_disk_errors(f"the checkpoint of iteration {iteration} is complete but not marked as the latest"):
        if run:
            add_run(iteration_folder(folder, iteration), run)
        name_latest(folder, iteration)


@contextmanager
def _named_disk_errors(state: str) -> Generator[None]:
    try:
        yield
    except OSError as error:
        raise CheckpointError(f"{error.filename}: {error.strerror}; {state}") from error


def remove_leftovers(run_dir: Path) -> None:
    """Remove incomplete checkpoints, dumps and HF exports. ``run_dir`` must be claimed, so that no other run writes to it."""
    for name in ("checkpoints", "rollouts"):
        remove_scratch(run_dir / name)
    for export in run_dir.glob(f"hf*{SCRATCH}"):
        shutil.rmtree(export, ignore_errors=True)
