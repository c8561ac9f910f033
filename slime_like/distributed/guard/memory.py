"""Sources of free memory for the guard, and how each releases memory: CUDA driver, torch's allocator, or host."""

from __future__ import annotations

import ctypes
import functools
import gc
import os
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Protocol

import torch

from slime_like.distributed.forensics.ring import Ring


class MemorySource(Protocol):
    """A source of free-memory readings. All numbers are bytes."""

    name: str
    total: int

    def free(self) -> int:
        """Return the free memory."""
        ...

    def held(self) -> int:
        """Return the memory held by this process, whose growth predicts when memory runs out."""
        ...

    def trim(self) -> None:
        """Release cached memory, without waiting for anything."""
        ...

    def clear(self) -> None:
        """Wait for the device, collect garbage, then release cached memory."""
        ...


class CudaDriver:
    """The device as the driver sees it: all processes, communicators included. A query may cost from 7 us to 8 ms."""

    name = "driver"

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.total = int(torch.cuda.mem_get_info(device)[1])

    def free(self) -> int:
        """Return the free memory of ``cudaMemGetInfo``."""
        return int(torch.cuda.mem_get_info(self._device)[0])

    def held(self) -> int:
        """Return the memory reserved by torch's allocator (``torch.cuda.memory_reserved`` sorts all statistics first)."""
        return int(torch.cuda.memory_stats_as_nested_dict(self._device)["reserved_bytes"]["all"]["current"])

    def trim(self) -> None:
        """Return cached blocks to the driver."""
        torch.cuda.empty_cache()

    def clear(self) -> None:
        """Synchronize, collect garbage and empty the cache, as slime's ``clear_memory``."""
        torch.cuda.synchronize(self._device)
        gc.collect()
        torch.cuda.empty_cache()


class TorchAllocator(CudaDriver):
    """The device as torch's allocator sees it: without communicators and other processes, and without a driver call."""

    name = "allocator"

    def free(self) -> int:
        """Return total memory minus live tensors: cached blocks count as free."""
        return self.total - int(torch.cuda.memory_allocated(self._device))


class HostMemory:
    """Main memory within the limits of every control group (v1 and v2) that this process is in."""

    name = "host"

    def __init__(self, proc: Path = Path("/proc"), groups: Path = Path("/sys/fs/cgroup")) -> None:
        self._meminfo = os.open(proc / "meminfo", os.O_RDONLY | os.O_CLOEXEC)
        self._statm = os.open(proc / "self/statm", os.O_RDONLY | os.O_CLOEXEC)
        self._page = os.sysconf("SC_PAGE_SIZE")
        self._limits = list(_limits(proc, groups))
        files = [self._meminfo, self._statm, *(file for _, *pair in self._limits for file in pair)]
        weakref.finalize(self, _close, files)
        physical = _kilobytes(_text(self._meminfo), "MemTotal:")
        self.total = min([physical, *(limit for limit, _, _ in self._limits)])

    def free(self) -> int:
        """Return the minimum over all limits; a group's reclaimable page cache counts as free."""
        available = _kilobytes(_text(self._meminfo), "MemAvailable:")
        for limit, usage, stat in self._limits:
            reclaimable = next((int(n) for name, n in _pairs(_text(stat)) if name in _INACTIVE), 0)
            available = min(available, limit - int(_text(usage)) + reclaimable)
        return max(0, available)

    def held(self) -> int:
        """Return the resident memory of this process."""
        return int(_text(self._statm).split()[1]) * self._page

    def trim(self) -> None:
        """Return the C library's free memory to the kernel."""
        trim = _malloc_trim()
        if trim is not None:
            trim(0)

    def clear(self) -> None:
        """Collect garbage, then trim."""
        gc.collect()
        self.trim()


def _close(files: list[int]) -> None:
    for file in files:
        os.close(file)


_INACTIVE = ("inactive_file", "total_inactive_file")


def _limits(proc: Path, groups: Path) -> Iterator[tuple[int, int, int]]:
    """Yield limit and open files of usage and statistics of every control group above this process that has a limit."""
    for line in (proc / "self/cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            root, names = groups, ("memory.max", "memory.current")
        elif "memory" in controllers.split(","):
            root, names = groups / "memory", ("memory.limit_in_bytes", "memory.usage_in_bytes")
        else:
            continue
        leaf = root / path.lstrip("/")
        for folder in (leaf, *leaf.parents):
            if folder == root.parent:
                break
            try:
                text = (folder / names[0]).read_text().strip()
                if text.isdigit() and int(text) < 1 << 60:
                    files = [os.open(folder / name, os.O_RDONLY | os.O_CLOEXEC) for name in (names[1], "memory.stat")]
                    yield int(text), files[0], files[1]
            except OSError:
                continue


def _text(file: int) -> str:
    return os.pread(file, 8192, 0).decode()


def _pairs(text: str) -> Iterator[tuple[str, str]]:
    for line in text.splitlines():
        name, _, value = line.partition(" ")
        yield name, value


def _kilobytes(text: str, name: str) -> int:
    start = text.index(name) + len(name)
    return int(text[start : text.index("kB", start)]) * 1024


@functools.cache
def _malloc_trim() -> Any:
    """Return glibc's malloc_trim, or None if the C library has none."""
    return getattr(ctypes.CDLL(None), "malloc_trim", None)


class RecordingMemorySource:
    """A source that records its last readings in the rank's ring, where they can be read after the rank's death."""

    def __init__(self, source: MemorySource, ring: Ring) -> None:
        self._source, self._ring = source, ring
        self.name, self.total = source.name, source.total
        self.trim, self.clear = source.trim, source.clear

    def free(self) -> int:
        """Return and record the source's reading."""
        num_free = self._source.free()
        self._ring.free(num_free, self.total)
        return num_free

    def held(self) -> int:
        """Return and record the source's reading."""
        num_held = self._source.held()
        self._ring.held(num_held)
        return num_held


def make_source(kind: str, device: torch.device) -> MemorySource:
    """Return the source that ``guard.memory`` names; on a CPU always the host's."""
    if device.type != "cuda" or kind == "host":
        return HostMemory()
    return TorchAllocator(device) if kind == "allocator" else CudaDriver(device)
