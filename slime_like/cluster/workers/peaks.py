"""Peak memory of a process by phase: torch's allocator on a GPU, resident memory on a CPU."""

from __future__ import annotations

import re
from collections.abc import Callable, Generator
from contextlib import contextmanager, suppress
from pathlib import Path

from slime_like.metrics.types import Max

PROC = Path("/proc/self")
HIGH_WATER = "5"  # written to clear_refs: resets the high-water mark of resident memory (proc(5))


class MemoryPeaks:
    """Memory peaks by phase since the last drain. Phases must not overlap, because each one resets the process's peak.

    Example: ``with peaks("step"): ...`` then ``peaks.drain()`` gives ``(Max("memory/step", bytes),)``.
    """

    def __init__(self, *, cuda: bool) -> None:
        self._peaks: dict[str, float] = {}
        self._reset: Callable[[], None] = _reset_device if cuda else _reset_host
        self._peak: Callable[[], float] = _device_peak if cuda else _host_peak

    @contextmanager
    def __call__(self, phase: str) -> Generator[None]:
        """Measure the memory peak of a block of ``phase``, even if the block raises an error."""
        self._reset()
        try:
            yield
        finally:
            self._peaks[phase] = max(self._peaks.get(phase, 0.0), self._peak())

    def drain(self) -> tuple[Max, ...]:
        """Return the peaks since the last drain, in bytes."""
        peaks, self._peaks = self._peaks, {}
        return tuple(Max(f"memory/{phase}", peak) for phase, peak in peaks.items())


def _reset_device() -> None:
    import torch

    torch.cuda.reset_peak_memory_stats()


def _device_peak() -> float:
    import torch

    return float(torch.cuda.max_memory_allocated())


def _reset_host() -> None:
    with suppress(OSError):  # without permission, the peak counts from the start of the process
        (PROC / "clear_refs").write_text(HIGH_WATER)


def _host_peak() -> float:
    match = re.search(r"^VmHWM:\s+(\d+) kB", (PROC / "status").read_text(), re.MULTILINE)
    assert match is not None, "/proc/self/status has no VmHWM"
    return 1024.0 * int(match[1])
