"""Named shared memory of an engine's processes, which outlives them when they are killed.

SGLang removes it only on a normal exit, and sweeps leftovers only in its own CI. This module can go when SGLang's
processes map memory without a name, or their supervisor removes the names.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable
from pathlib import Path

from slime_like.rollout.engine.processes import members

SHARED = Path("/dev/shm")
# Load figures, messages between tensor parallel ranks, semaphores of multiprocessing, CUDA's and NCCL's own. Nothing else:
# a user may store a model there.
PREFIXES = ("sglang_loads_", "sgl_shm_", "sem.mp-", "cuda.shm.", "nccl-")


SCRATCH_PREFIX = "slime_like-engine-"  # of an engine's temporary folder (its TMPDIR)


def mapped(group: int) -> frozenset[Path]:
    """Return the named segments that the running processes of a group have mapped now."""
    return mapped_by(int(process.name) for process in members(group))


def mapped_by(pids: Iterable[int]) -> frozenset[Path]:
    """Return the named segments that processes have mapped now."""
    segments: set[Path] = set()
    for pid in pids:
        try:
            lines = Path(f"/proc/{pid}/maps").read_text().splitlines()
        except OSError:  # the process has ended
            continue
        paths = (Path(line.split(maxsplit=5)[5]) for line in lines if f" {SHARED}/" in line)
        segments |= {path for path in paths if path.parent == SHARED and path.name.startswith(PREFIXES)}
    return frozenset(segments)


def scratch_of(pids: Iterable[int]) -> frozenset[Path]:
    """Return the temporary folders of engines, read from the environment of their processes."""
    scratch: set[Path] = set()
    for pid in pids:
        with contextlib.suppress(OSError):  # the process has ended
            fields = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
            folders = (Path(os.fsdecode(field[7:])) for field in fields if field.startswith(b"TMPDIR="))
            scratch |= {folder for folder in folders if folder.name.startswith(SCRATCH_PREFIX)}
    return frozenset(scratch)


def remove(segments: Iterable[Path]) -> None:
    """Remove the names; processes that have the memory mapped keep it."""
    for segment in segments:
        with contextlib.suppress(OSError):
            segment.unlink()
