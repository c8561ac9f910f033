"""Conversion of the errors that torch and megatron-core raise on a damaged checkpoint into ``CheckpointError``."""

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

# Raised on truncated, missing or foreign files. CheckpointException is a BaseException.
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
    """Convert a reader's error on damage to ``CheckpointError(message(summary))``; errors of this project pass unchanged."""
    try:
        yield
    except (SlimeLikeError, torch.OutOfMemoryError, dist.DistError):  # the latter two are not about the files
        raise
    except DAMAGED as error:
        raise _project_error(error) or CheckpointError(message(error_summary(error))) from error


def _project_error(error: BaseException) -> CheckpointError | None:
    """Return the first error of this project that torch has wrapped into ``error``, at any depth."""
    if isinstance(error, CheckpointError):
        return error
    failures = cast("dict[int, tuple[Any, Any]]", error.failures) if isinstance(error, CheckpointException) else {}
    return next((wrapped for failure, _ in failures.values() if (wrapped := _project_error(failure))), None)


def error_summary(error: BaseException) -> str:
    """Return class and first line of an error."""
    text = str(error).strip().splitlines()
    return f"{type(error).__name__}: {text[0][:200]}" if text else type(error).__name__


def checked_manifest(source: Path, *, verify: bool) -> Manifest:
    """Return the ``Manifest`` of an iteration's folder; with ``verify`` after comparing its files with their hashes.

    Collective: each file is read by one rank. Raises ``CheckpointError`` on all ranks if a file has changed.
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
