"""Check limits of this process and machine that would otherwise make a run fail later."""

from __future__ import annotations

import resource
import shutil
from collections.abc import Iterator
from pathlib import Path

from slime_like.cluster.plan.machine import memory_bytes
from slime_like.errors import ConfigError

SHARED = Path("/dev/shm")
MIN_FILES = 1024  # raylet and an engine open a few hundred each
WANTED_FILES = 65_536
MIN_ADDRESSES = 16 * 2**30  # the driver of a run on a CPU maps 8 GB: Ray's object store, thread stacks
# For the ranks' rings and SGLang's segments. Ray moves its object store to a disk if there is too little space.
MIN_SHARED = 16 * 2**20


def check_limits(device: str) -> None:
    """Increase this process's limit of open files if possible, then raise ``ConfigError`` naming every limit that is too low."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if (files := _attainable_files()) > _finite(soft):
        resource.setrlimit(resource.RLIMIT_NOFILE, (int(files), hard))
    if problems := list(limits_too_low(device)):
        raise ConfigError("\n".join(problems))


def limits_too_low(device: str) -> Iterator[str]:
    """Yield one line per limit that is too low, with its value, the requirement and the fix.

    For open files, the value is the limit that ``check_limits`` can set.
    """
    files = _attainable_files()
    if files < MIN_FILES:
        yield f"ulimit -n is {files:g}: a process of a run opens up to {MIN_FILES} files: run `ulimit -n {WANTED_FILES}` first"
    addresses = _limit(resource.RLIMIT_AS)
    if addresses < MIN_ADDRESSES or (device == "cuda" and addresses != float("inf")):
        requirement = (
            "CUDA reserves terabytes of addresses" if device == "cuda" else f"Ray maps {MIN_ADDRESSES / 2**30:g} GiB"
        )
        yield f"ulimit -v is {addresses / 1024:.0f} kB: {requirement}, even if it uses little of them: run `ulimit -v unlimited` first"
    size, memory = _limit(resource.RLIMIT_FSIZE), memory_bytes()
    if size < memory:
        yield (
            f"ulimit -f is {size / 1024:.0f} kB: a file of checkpoints, or of Ray's object store in {SHARED}, may be larger, "
            f"up to the size of the memory ({memory / 2**30:.0f} GiB): run `ulimit -f unlimited` first"
        )
    if SHARED.is_dir() and (free := shutil.disk_usage(SHARED).free) < MIN_SHARED:
        yield (
            f"{SHARED} has {free / 2**20:.1f} MiB free, a run needs {MIN_SHARED // 2**20}: remove files from it, or start the "
            "container with --shm-size=4g"
        )


def _attainable_files() -> float:
    """Return the limit of open files that this process can set, at most ``WANTED_FILES`` unless it is higher already."""
    soft, hard = map(_finite, resource.getrlimit(resource.RLIMIT_NOFILE))
    return max(soft, min(hard, WANTED_FILES))


def _limit(kind: int) -> float:
    return _finite(resource.getrlimit(kind)[0])


def _finite(value: int) -> float:
    return float("inf") if value == resource.RLIM_INFINITY else float(value)
