"""Peak memory by phase: each phase reports its own peak."""

from __future__ import annotations

import mmap

import pytest

from slime_like.cluster.workers.peaks import MemoryPeaks
from slime_like.util.gpus import visible_gpus

MIB = 2**20


def _touch(num_bytes: int) -> None:
    """Use memory for a moment. It is mapped, because malloc could reuse free memory that is already resident."""
    with mmap.mmap(-1, num_bytes) as memory:
        for start in range(0, num_bytes, mmap.PAGESIZE):
            memory[start] = 1


def test_a_phase_has_its_own_peak() -> None:
    peaks = MemoryPeaks(cuda=False)
    with peaks("push"):
        _touch(256 * MIB)
    with peaks("step"):
        pass
    peak = {metric.name: metric.value for metric in peaks.drain()}
    assert peak["memory/push"] - peak["memory/step"] > 128 * MIB
    assert peaks.drain() == ()


def test_the_higher_of_two_peaks_is_reported() -> None:
    peaks = MemoryPeaks(cuda=False)
    for size in (128, 1):
        with peaks("score"):
            _touch(size * MIB)
    (first,) = peaks.drain()
    with peaks("score"):
        pass
    assert first.value - peaks.drain()[0].value > 64 * MIB


@pytest.mark.gpu
@pytest.mark.skipif(not visible_gpus(), reason="needs a GPU")
def test_peak_on_a_gpu_counts_torch_allocations() -> None:
    import torch

    peaks = MemoryPeaks(cuda=True)
    with peaks("push"):
        torch.empty(256 * MIB, dtype=torch.uint8, device="cuda")
    with peaks("step"):
        torch.empty(MIB, dtype=torch.uint8, device="cuda")
    peak = {metric.name: metric.value for metric in peaks.drain()}
    assert peak["memory/push"] - peak["memory/step"] > 128 * MIB
