"""Named shared memory of an engine's processes, which outlives them when they are killed.

SGLang removes it in no other way than by ending normally, and sweeps leftovers in its own CI only. Goes when SGLang's
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
# a user may keep a model there.
PREFIXES = ("sglang_loads_", "sgl_shm_", "sem.mp-", "cuda.shm.", "nccl-")


SCRATCH_PREFIX = "slime_like-engine-"  # of an engine's own temporary folder, which is its TMPDIR


def mapped(group: int) -> frozenset[Path]:
    """What the living processes of a process group have mapped now."""
    return mapped_by(int(process.name) for process in members(group))


def mapped_by(pids: Iterable[int]) -> frozenset[Path]:
    """Return the named segments that processes have mapped now."""
    found: set[Path] = set()
    for pid in pids:
        try:
            lines = Path(f"/proc/{pid}/maps").read_text().splitlines()
        except OSError:  # ended meanwhile
            continue
        paths = (Path(line.split(maxsplit=5)[5]) for line in lines if f" {SHARED}/" in line)
        found |= {path for path in paths if path.parent == SHARED and path.name.startswith(PREFIXES)}
    return frozenset(found)


def scratch_of(pids: Iterable[int]) -> frozenset[Path]:
    """Temporary folders of engines, as their processes have them in the environment."""
    found: set[Path] = set()
    for pid in pids:
        with contextlib.suppress(OSError):  # ended meanwhile
            fields = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
            folders = (Path(os.fsdecode(field[7:])) for field in fields if field.startswith(b"TMPDIR="))
            found |= {folder for folder in folders if folder.name.startswith(SCRATCH_PREFIX)}
    return frozenset(found)


def remove(segments: Iterable[Path]) -> None:
    """Remove the names; who has the memory mapped keeps it."""
    for segment in segments:
        with contextlib.suppress(OSError):
            segment.unlink()
