"""File work done by rank 0 for all ranks. Its failure is raised on every rank, so that none is left waiting."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import torch.distributed as dist

from slime_like.errors import CheckpointError


def on_rank_zero(action: Callable[[], None]) -> None:
    """Run ``action`` on rank 0 while the others wait. Raises its ``CheckpointError`` (or OSError as one) on all."""
    outcome: list[str | None] = [None]
    if dist.get_rank() == 0:
        try:
            action()
        except CheckpointError as error:
            outcome = [str(error)]
        except OSError as error:
            outcome = [f"{error.filename}: {error.strerror}; choose a folder on a disk that can be written"]
    dist.broadcast_object_list(outcome)
    if outcome[0] is not None:
        raise CheckpointError(outcome[0])


def make_empty(folder: Path) -> None:
    """Create ``folder``, empty, with its parents."""
    if folder.exists():
        shutil.rmtree(folder)
    folder.mkdir(parents=True)
