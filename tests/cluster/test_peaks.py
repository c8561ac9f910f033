"""Peak memory by phase is that of the phase, not of what came before it."""

from __future__ import annotations

import pytest

from slime_like.cluster.workers.peaks import MemoryPeaks
from slime_like.util.gpus import visible_gpus

MIB = 2**20


def test_a_phase_has_its_own_peak() -> None:
    peaks = MemoryPeaks(cuda=False)
    with peaks("push"):
        held = bytearray(256 * MIB)
        held[::4096] = b"x" * len(held[::4096])
        del held
    with peaks("step"):
        pass
    found = {metric.name: metric.value for metric in peaks.drain()}
    assert found["memory/push"] - found["memory/step"] > 128 * MIB
    assert peaks.drain() == ()


def test_the_higher_of_two_is_kept() -> None:
    peaks = MemoryPeaks(cuda=False)
    for size in (128, 1):
        with peaks("score"):
            held = bytearray(size * MIB)
            held[::4096] = b"x" * len(held[::4096])
            del held
    (first,) = peaks.drain()
    with peaks("score"):
        pass
    assert first.value - peaks.drain()[0].value > 64 * MIB


@pytest.mark.gpu
@pytest.mark.skipif(not visible_gpus(), reason="needs a GPU")
def test_on_a_gpu_it_is_what_torch_allocated() -> None:
    import torch

    peaks = MemoryPeaks(cuda=True)
    with peaks("push"):
        torch.empty(256 * MIB, dtype=torch.uint8, device="cuda")
    with peaks("step"):
        torch.empty(MIB, dtype=torch.uint8, device="cuda")
    found = {metric.name: metric.value for metric in peaks.drain()}
    assert found["memory/push"] - found["memory/step"] > 128 * MIB
