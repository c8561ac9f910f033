"""Counters of the phantom GPU that this process runs on."""

from __future__ import annotations

import ctypes
from dataclasses import astuple, dataclass

_PROCESS = ctypes.CDLL(None)


@dataclass(frozen=True, slots=True)
class CallCounts:
    """Counts of calls since the process started, or between two readings. ``csrc/phantom.c`` has the same order."""

    launches: int = 0
    products: int = 0  # calls to cuBLAS, such as GEMMs
    copies_to_device: int = 0
    copies_to_host: int = 0
    copies_on_device: int = 0
    syncs: int = 0  # the host waited for a stream, an event or the device
    collectives: int = 0
    allocations: int = 0  # allocations by the driver, not by torch's allocator
    graphs: int = 0
    shares: int = 0  # handles of device memory made for other processes
    openings: int = 0  # handles that this process opened
    closings: int = 0
    pageable_copies: int = 0  # copies to the host whose target is not pinned

    def __sub__(self, earlier: CallCounts) -> CallCounts:
        """Return the calls between ``earlier`` and this reading."""
        return CallCounts(*(a - b for a, b in zip(astuple(self), astuple(earlier), strict=True)))


def is_phantom() -> bool:
    """Return whether this process runs on phantom GPUs."""
    return hasattr(_PROCESS, "phantom_gpu_counters")


def read_counts() -> CallCounts:
    """Return the counts of this process's calls so far."""
    assert is_phantom(), "this process does not run on a phantom GPU"
    size, function = ctypes.c_int(), _PROCESS.phantom_gpu_counters
    function.restype = ctypes.POINTER(ctypes.c_ulong)
    values = function(ctypes.byref(size))
    return CallCounts(*(int(values[i]) for i in range(size.value)))


def pinned_bytes() -> int:
    """Return the bytes of pinned host memory."""
    return _size("phantom_gpu_pinned")


def pageable_bytes() -> int:
    """Return the bytes of torch's pageable host blocks that are larger than ``PhantomGpu.host_limit`` and so hold no values."""
    return _size("phantom_gpu_pageable")


def used_bytes(device: int = 0) -> int:
    """Return the bytes of device memory allocated by the driver, without the context."""
    return _size("phantom_gpu_used", device)


def peak_bytes(device: int = 0) -> int:
    """Return the maximum of ``used_bytes`` since the start or ``reset_peak``."""
    return _size("phantom_gpu_peak", device)


def reset_peak(device: int = 0) -> None:
    """Reset the peak to the bytes that are allocated now."""
    _PROCESS.phantom_gpu_reset_peak(device)


def _size(name: str, *arguments: int) -> int:
    function = getattr(_PROCESS, name)
    function.restype = ctypes.c_size_t
    return int(function(*arguments))
