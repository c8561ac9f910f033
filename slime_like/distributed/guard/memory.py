"""Memory sources of the guard (CUDA driver, torch's allocator, host), which read free memory and release cached memory."""

from __future__ import annotations

import ctypes
import functools
import gc
import os
import weakref
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, Protocol

import torch

from slime_like.distributed.forensics.ring import Ring
from slime_like.util.cgroups import UNLIMITED_BYTES, control_groups


class MemorySource(Protocol):
    """A kind of memory whose free bytes can be read and whose caches can be released. All numbers are bytes."""

    name: str
    total: int

    def free(self) -> int:
        """Return the free memory."""
        ...

    def process_bytes(self) -> int:
        """Return the memory held by this process."""
        ...

    def trim(self) -> None:
        """Release cached memory. Unlike ``clear``, do not synchronize with the device first."""
        ...

    def clear(self) -> None:
        """Wait for the device, collect garbage, then release cached memory."""
        ...


class CudaDriver:
    """Device memory as counted by the driver, including communicators and other processes. A query takes 7 us to 8 ms."""

    name = "driver"

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.total = int(torch.cuda.mem_get_info(device)[1])

    def free(self) -> int:
        """Return the free memory that ``cudaMemGetInfo`` reports."""
        return int(torch.cuda.mem_get_info(self._device)[0])

    def process_bytes(self) -> int:
        """Return the memory reserved by torch's allocator. ``torch.cuda.memory_reserved`` is slower: it sorts all statistics."""
        return int(torch.cuda.memory_stats_as_nested_dict(self._device)["reserved_bytes"]["all"]["current"])

    def trim(self) -> None:
        """Give cached blocks back to the driver."""
        torch.cuda.empty_cache()

    def clear(self) -> None:
        """Synchronize, collect garbage and empty the cache, like slime's ``clear_memory``."""
        torch.cuda.synchronize(self._device)
        gc.collect()
        torch.cuda.empty_cache()


class TorchAllocator(CudaDriver):
    """Device memory. ``free`` asks torch's allocator, not the driver, so it ignores communicators and other processes."""

    name = "allocator"

    def free(self) -> int:
        """Return total memory minus live tensors. Cached blocks count as free."""
        return self.total - int(torch.cuda.memory_allocated(self._device))


class HostMemory:
    """Main memory, within the limits of all control groups (v1 and v2) of this process."""

    name = "host"

    def __init__(self, proc: Path = Path("/proc"), groups: Path = Path("/sys/fs/cgroup")) -> None:
        self._meminfo = os.open(proc / "meminfo", os.O_RDONLY | os.O_CLOEXEC)
        self._statm = os.open(proc / "self/statm", os.O_RDONLY | os.O_CLOEXEC)
        self._page = os.sysconf("SC_PAGE_SIZE")
        self._limits = list(_limits(proc, groups))
        files = [self._meminfo, self._statm, *(file for _, *pair in self._limits for file in pair)]
        weakref.finalize(self, _close, files)
        physical = _kilobytes(_read(self._meminfo), "MemTotal:")
        self.total = min([physical, *(limit for limit, _, _ in self._limits)])

    def free(self) -> int:
        """Return the free memory of the machine or, if less, of the control group with the least free memory.

        A control group's inactive page cache counts as free.
        """
        available = _kilobytes(_read(self._meminfo), "MemAvailable:")
        for limit, usage, stat in self._limits:
            available = min(available, limit - int(_read(usage)) + _inactive_file(_read(stat)))
        return max(0, available)

    def process_bytes(self) -> int:
        """Return the resident memory of this process."""
        return int(_read(self._statm).split()[1]) * self._page

    def trim(self) -> None:
        """Give the C library's free memory back to the kernel."""
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


_FILES = {1: ("memory.limit_in_bytes", "memory.usage_in_bytes"), 2: ("memory.max", "memory.current")}


def _limits(proc: Path, groups: Path) -> Iterator[tuple[int, int, int]]:
    """Yield (limit in bytes, descriptor of the usage file, descriptor of memory.stat) for each control group with a limit.

    Only groups of this process are read. Groups with an unreadable file are skipped.
    """
    for folder, version in control_groups("memory", proc, groups):
        limit_name, usage_name = _FILES[version]
        with suppress(OSError):
            text = (folder / limit_name).read_text().strip()
            if text.isdigit() and int(text) < UNLIMITED_BYTES:
                usage = os.open(folder / usage_name, os.O_RDONLY | os.O_CLOEXEC)
                try:
                    statistics = os.open(folder / "memory.stat", os.O_RDONLY | os.O_CLOEXEC)
                except OSError:
                    os.close(usage)
                    raise
                yield int(text), usage, statistics


def _read(file: int) -> str:
    return os.pread(file, 8192, 0).decode()


def _inactive_file(statistics: str) -> int:
    """Return the inactive page cache of a control group and its children, which its usage includes.

    ``inactive_file`` includes the children in version 2; in version 1 only ``total_inactive_file`` does.
    """
    for name in ("\ntotal_inactive_file ", "\ninactive_file "):
        _, field_name, value = f"\n{statistics}".partition(name)
        if field_name:
            return int(value.partition("\n")[0])
    return 0


def _kilobytes(text: str, name: str) -> int:
    start = text.index(name) + len(name)
    return int(text[start : text.index("kB", start)]) * 1024


@functools.cache
def _malloc_trim() -> Any:
    """Return glibc's malloc_trim, or None if the C library has none."""
    return getattr(ctypes.CDLL(None), "malloc_trim", None)


class RecordingMemorySource:
    """A source that also records its readings in the rank's ring, from which they can be read after the rank has died."""

    def __init__(self, source: MemorySource, ring: Ring) -> None:
        self._source, self._ring = source, ring
        self.name, self.total = source.name, source.total
        self.trim, self.clear = source.trim, source.clear

    def free(self) -> int:
        """Return the free memory, and record it in the ring."""
        num_free = self._source.free()
        self._ring.record_free(num_free, self.total)
        return num_free

    def process_bytes(self) -> int:
        """Return the memory held by this process, and record it in the ring."""
        process_bytes = self._source.process_bytes()
        self._ring.record_held(process_bytes)
        return process_bytes


def make_source(kind: str, device: torch.device) -> MemorySource:
    """Return the source for ``kind``, a value of ``guard.memory``. On a CPU it is always ``HostMemory``."""
    if device.type != "cuda" or kind == "host":
        return HostMemory()
    return TorchAllocator(device) if kind == "allocator" else CudaDriver(device)
