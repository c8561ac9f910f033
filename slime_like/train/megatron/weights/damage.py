"""One ``CheckpointError`` for everything that torch's and megatron-core's readers raise on a damaged checkpoint."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
from megatron.core.dist_checkpointing.core import CheckpointingException
from torch.distributed.checkpoint import CheckpointException

from slime_like.checkpoint.record import CheckpointRecord, Manifest, check_content, read_record
from slime_like.errors import CheckpointError, SlimeLikeError

# Files that are cut short, missing or of another making. CheckpointException is a BaseException.
DAMAGED = (
    CheckpointException,
    CheckpointingException,
    pickle.UnpicklingError,
    OSError,
    EOFError,
    KeyError,
    ValueError,
    RuntimeError,
    TypeError,
    AttributeError,
    IndexError,
)


@contextmanager
def damage_named(message: Callable[[str], str]) -> Generator[None]:
    """Raise ``CheckpointError(message(summary))`` for what a reader raises on damage; errors of this project pass as they are."""
    try:
        yield
    except (SlimeLikeError, torch.OutOfMemoryError, dist.DistError):  # the latter two say nothing of the files
        raise
    except DAMAGED as error:
        raise _own(error) or CheckpointError(message(error_summary(error))) from error


def _own(error: BaseException) -> CheckpointError | None:
    """Return the first error of this project that torch has wrapped into ``error``, in however many layers."""
    if isinstance(error, CheckpointError):
        return error
    failures = cast("dict[int, tuple[Any, Any]]", error.failures) if isinstance(error, CheckpointException) else {}
    return next((own for failure, _ in failures.values() if (own := _own(failure))), None)


def error_summary(error: BaseException) -> str:
    """Return class and first line of an error."""
    text = str(error).strip().splitlines()
    return f"{type(error).__name__}: {text[0][:200]}" if text else type(error).__name__


def checked_manifest(source: Path, *, verify: bool) -> Manifest:
    """Return the ``Manifest`` of an iteration's folder, after its files were compared with their hashes where asked.

    Collective: each file is read by one rank. Raises ``CheckpointError`` on all ranks where a file has changed.
    """
    record: CheckpointRecord | None = None
    error: str | None = None
    try:
        record = read_record(source)
        if verify and record.hashed:
            by_size = sorted(record.files, key=lambda name: -record.files[name].size)
            check_content(source, record, by_size[dist.get_rank() :: dist.get_world_size()], rollout=False)
    except CheckpointError as changed:
        error = str(changed)
    errors: list[str | None] = [None] * dist.get_world_size()
    dist.all_gather_object(errors, error)
    if first := next(filter(None, errors), None):
        raise CheckpointError(first)
    assert record is not None
    return record.manifest
