"""Peak memory of a process, phase by phase: torch's on a GPU, resident memory on a CPU."""

from __future__ import annotations

import re
from collections.abc import Callable, Generator
from contextlib import contextmanager, suppress
from pathlib import Path

from slime_like.metrics.types import Max

PROC = Path("/proc/self")
HIGH_WATER = "5"  # written to clear_refs: the kernel begins a new high-water mark of resident memory (proc(5))


class MemoryPeaks:
    """Records a peak per phase until drained; the phases of a rank follow one another.

    Example: ``with peaks("step"): ...`` then ``peaks.drain()`` gives ``(Max("memory/step", bytes),)``.
    """

    def __init__(self, *, cuda: bool) -> None:
        self._found: dict[str, float] = {}
        self._reset: Callable[[], None] = _reset_device if cuda else _reset_host
        self._peak: Callable[[], float] = _device_peak if cuda else _host_peak

    @contextmanager
    def __call__(self, phase: str) -> Generator[None]:
        """Measure a block, whether it succeeds or not."""
        self._reset()
        try:
            yield
        finally:
            self._found[phase] = max(self._found.get(phase, 0.0), self._peak())

    def drain(self) -> tuple[Max, ...]:
        """Everything recorded since the last drain, in bytes."""
        found, self._found = self._found, {}
        return tuple(Max(f"memory/{phase}", peak) for phase, peak in found.items())


def _reset_device() -> None:
    import torch

    torch.cuda.reset_peak_memory_stats()


def _device_peak() -> float:
    import torch

    return float(torch.cuda.max_memory_allocated())


def _reset_host() -> None:
    with suppress(OSError):  # where the kernel refuses, a peak is that of the process so far
        (PROC / "clear_refs").write_text(HIGH_WATER)


def _host_peak() -> float:
    found = re.search(r"^VmHWM:\s+(\d+) kB", (PROC / "status").read_text(), re.MULTILINE)
    assert found is not None, "/proc/self/status has no VmHWM"
    return 1024.0 * int(found[1])
