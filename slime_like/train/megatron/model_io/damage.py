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

# Errors that readers raise on truncated, missing or foreign files. CheckpointException is a BaseException.
READ_ERRORS = (
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
GLOO = "/gloo/transport/"  # part of the path of its source file, with which gloo's messages begin


@contextmanager
def convert_damage(message: Callable[[str], str]) -> Generator[None]:
    """Convert errors on damaged files to ``CheckpointError(message(summary))``; ``summary`` describes the original error.

    Errors of this project, ``OutOfMemoryError``, ``DistError`` and gloo's errors pass unchanged. If torch has wrapped a
    ``CheckpointError``, that error is raised.
    """
    try:
        yield
    except (SlimeLikeError, torch.OutOfMemoryError, dist.DistError):  # not about the files
        raise
    except READ_ERRORS as error:
        if isinstance(error, RuntimeError) and GLOO in str(error):  # a collective failed
            raise
        raise _project_error(error) or CheckpointError(message(summarize_error(error))) from error


def _project_error(error: BaseException) -> CheckpointError | None:
    """Return the first ``CheckpointError`` among ``error`` and the errors that torch wrapped in it, at any depth; else None."""
    if isinstance(error, CheckpointError):
        return error
    failures = cast("dict[int, tuple[Any, Any]]", error.failures) if isinstance(error, CheckpointException) else {}
    return next((wrapped for failure, _ in failures.values() if (wrapped := _project_error(failure))), None)


def summarize_error(error: BaseException) -> str:
    """Return the class name of an error and at most 200 characters of the first line of its message."""
    text = str(error).strip().splitlines()
    return f"{type(error).__name__}: {text[0][:200]}" if text else type(error).__name__


def read_verified_manifest(source: Path, *, verify: bool) -> Manifest:
    """Return an iteration's ``Manifest``, after comparing its files with the recorded sizes and, if ``verify``, hashes.

    Old checkpoints have no hashes. Collective: each file is hashed by one rank. Raises ``CheckpointError`` on all ranks if on
    any rank a file is missing, changed or unreadable, or if ``read_record`` rejects checkpoint.json.
    """
    record: CheckpointRecord | None = None
    error: str | None = None
    try:
        record = read_record(source)
        if verify and record.hashed:
            by_size = sorted(record.files, key=lambda name: -record.files[name].size)
            check_content(source, record, by_size[dist.get_rank() :: dist.get_world_size()], rollout=False)
    except CheckpointError as failure:
        error = str(failure)
    except OSError as failure:  # such as a folder that this rank may not enter
        error = f"{failure.filename or source}: cannot be read ({failure.strerror}); make it readable on every node"
    errors: list[str | None] = [None] * dist.get_world_size()
    dist.all_gather_object(errors, error)
    if first := next(filter(None, errors), None):
        raise CheckpointError(first)
    assert record is not None
    return record.manifest
