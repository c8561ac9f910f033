"""Where the guard asks for free memory, and how it gives some back: the CUDA driver, torch's allocator, or the host."""

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
    """What the guard knows of memory. All numbers are bytes."""

    name: str
    total: int

    def free(self) -> int:
        """What may still be taken."""
        ...

    def held(self) -> int:
        """What this process holds: how fast it grows tells when memory runs out."""
        ...

    def trim(self) -> None:
        """Give back what is cached, without waiting for anything."""
        ...

    def clear(self) -> None:
        """Wait for the device, collect garbage, then give back what is cached."""
        ...


class CudaDriver:
    """The device as the driver sees it: all processes, communicators included. A query may cost from 7 us to 8 ms."""

    name = "driver"

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.total = int(torch.cuda.mem_get_info(device)[1])

    def free(self) -> int:
        """``cudaMemGetInfo``."""
        return int(torch.cuda.mem_get_info(self._device)[0])

    def held(self) -> int:
        """Reserved by torch's allocator (as ``torch.cuda.memory_reserved``, which flattens and sorts all statistics first)."""
        return int(torch.cuda.memory_stats_as_nested_dict(self._device)["reserved_bytes"]["all"]["current"])

    def trim(self) -> None:
        """Cached blocks go back to the driver."""
        torch.cuda.empty_cache()

    def clear(self) -> None:
        """As slime's ``clear_memory``."""
        torch.cuda.synchronize(self._device)
        gc.collect()
        torch.cuda.empty_cache()


class TorchAllocator(CudaDriver):
    """The device as torch's allocator sees it: without communicators and other processes, and without a driver call."""

    name = "allocator"

    def free(self) -> int:
        """All memory less what live tensors take: cached blocks count as free."""
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
        """The least that any limit leaves; a group's page cache that the kernel would drop counts as free."""
        found = _kilobytes(_text(self._meminfo), "MemAvailable:")
        for limit, usage, stat in self._limits:
            dropped = next((int(n) for name, n in _pairs(_text(stat)) if name in _INACTIVE), 0)
            found = min(found, limit - int(_text(usage)) + dropped)
        return max(0, found)

    def held(self) -> int:
        """Resident memory of this process."""
        return int(_text(self._statm).split()[1]) * self._page

    def trim(self) -> None:
        """The C library's free memory goes back to the kernel."""
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
    """Limit, and open files of usage and statistics, of every group above this process that has a limit."""
    for line in (proc / "self/cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            root, names = groups, ("memory.max", "memory.current")
        elif "memory" in controllers.split(","):
            root, names = groups / "memory", ("memory.limit_in_bytes", "memory.usage_in_bytes")
        else:
            continue
        here = root / path.lstrip("/")
        for folder in (here, *here.parents):
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
    """glibc's, or None where the C library has none."""
    return getattr(ctypes.CDLL(None), "malloc_trim", None)


class RecordingMemorySource:
    """A source whose last answers stand in the rank's ring, where others find them after its death."""

    def __init__(self, source: MemorySource, ring: Ring) -> None:
        self._source, self._ring = source, ring
        self.name, self.total = source.name, source.total
        self.trim, self.clear = source.trim, source.clear

    def free(self) -> int:
        """The source's answer."""
        found = self._source.free()
        self._ring.free(found, self.total)
        return found

    def held(self) -> int:
        """The source's answer."""
        found = self._source.held()
        self._ring.held(found)
        return found


def make_source(kind: str, device: torch.device) -> MemorySource:
    """The source that ``guard.memory`` names; on a CPU it is the host's in any case."""
    if device.type != "cuda" or kind == "host":
        return HostMemory()
    return TorchAllocator(device) if kind == "allocator" else CudaDriver(device)
