"""What only a GPU can show: what a question costs there, what the first and later calls of an op take, what a clear gives."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from slime_like.config.guard_policy import GuardSpec, Policy
from slime_like.distributed import install
from slime_like.distributed.memory import CudaDriver, TorchAllocator

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]
DEVICE = torch.device("cuda", 0)


def test_what_a_question_costs(record_property: Callable[[str, object], None]) -> None:
    source, times = CudaDriver(DEVICE), list[float]()
    for _ in range(200):
        start = time.perf_counter()
        assert 0 < source.free() <= source.total
        times.append((time.perf_counter() - start) * 1e6)
    record_property("mem_get_info_us", statistics.median(times))


def test_a_clear_gives_cached_blocks_back(record_property: Callable[[str, object], None]) -> None:
    for source in (CudaDriver(DEVICE), TorchAllocator(DEVICE)):
        block = torch.empty(2**30, dtype=torch.uint8, device=DEVICE)
        del block
        held, free = source.held(), source.free()
        assert held >= 2**30
        start = time.perf_counter()
        source.clear()
        record_property(f"clear_ms_{source.name}", (time.perf_counter() - start) * 1e3)
        assert source.held() <= held - 2**30
        if source.name == "driver":
            assert source.free() >= free + 2**30


def test_nccl_ops_pass_the_wrapper(tmp_path: Path, record_property: Callable[[str, object], None]) -> None:
    """One rank: results as without, and what the first call of an op takes from the driver's free memory."""
    torch.cuda.set_device(DEVICE)
    spec = GuardSpec(wrap=True, default=Policy(checks="always"), folder=str(tmp_path), name="trainer", release=True)
    wrapper = install.install(spec, DEVICE, 0)
    assert wrapper is not None
    dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1)
    try:
        source = CudaDriver(DEVICE)
        for name in ("first", "second"):
            before = source.free()
            tensor = torch.arange(1024.0, device=DEVICE)
            dist.all_reduce(tensor)
            torch.cuda.synchronize()
            assert torch.equal(tensor.cpu(), torch.arange(1024.0))
            record_property(f"all_reduce_{name}_drop_bytes", before - source.free())
        install.release()
        record_property("released_bytes", source.free())
        with install.phase("step"):
            tensor = torch.arange(1024.0, device=DEVICE)
            dist.all_reduce(tensor)
        assert wrapper.generation == 1
        assert torch.equal(tensor.cpu(), torch.arange(1024.0))
        (counter,) = [c for c in wrapper.counters() if c.op.name == "all_reduce"]
        assert (counter.calls, counter.checks) == (3, 3)
    finally:
        dist.destroy_process_group()
        install.remove()
