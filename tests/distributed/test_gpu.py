"""Guard on a GPU: cost of a memory query, memory that calls of an op take, and memory that a clear frees."""

from __future__ import annotations

import importlib
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from slime_like.config.schema.guard_policy import GuardSpec, MemoryPolicy
from slime_like.distributed.guard.advice import MeasuredOp, read_rows
from slime_like.distributed.guard.memory import CudaDriver, TorchAllocator
from slime_like.distributed.wrapper import install
from tests.values import has_values

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]
DEVICE = torch.device("cuda", 0)


def test_cost_of_a_memory_query(record_property: Callable[[str, object], None]) -> None:
    source, times = CudaDriver(DEVICE), list[float]()
    for _ in range(200):
        start = time.perf_counter()
        assert 0 < source.free() <= source.total
        times.append((time.perf_counter() - start) * 1e6)
    record_property("mem_get_info_us", statistics.median(times))


def test_a_clear_frees_cached_blocks(record_property: Callable[[str, object], None]) -> None:
    for source in (CudaDriver(DEVICE), TorchAllocator(DEVICE)):
        block = torch.empty(2**30, dtype=torch.uint8, device=DEVICE)
        del block
        process_bytes, free = source.process_bytes(), source.free()
        assert process_bytes >= 2**30
        start = time.perf_counter()
        source.clear()
        record_property(f"clear_ms_{source.name}", (time.perf_counter() - start) * 1e3)
        assert source.process_bytes() <= process_bytes - 2**30
        if source.name == "driver":
            assert source.free() >= free + 2**30


SWEPT = (
    "all_reduce",
    "broadcast",
    "all_gather_into_tensor",
    "reduce_scatter_tensor",
    "all_to_all_single",
    "barrier",
    "all_gather_into_tensor_coalesced",
    "broadcast_object_list",
)


@pytest.fixture(scope="module")
def swept(tmp_path_factory: pytest.TempPathFactory) -> dict[str, MeasuredOp]:
    """Measure each op of ``scripts/profile_comm.py --sweep`` over NCCL in a world of one."""
    folder = tmp_path_factory.mktemp("swept")
    torch.cuda.set_device(DEVICE)
    install.install(GuardSpec(wrap=True, profile=str(folder)), DEVICE, 0)
    dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1)
    try:
        importlib.import_module("scripts.profile_comm").measure(DEVICE)
    finally:
        dist.destroy_process_group()
        install.remove()
    (rows,) = read_rows(folder).values()
    return {row.op: row for row in rows}


@pytest.mark.parametrize("op", SWEPT)
def test_memory_of_first_and_later_calls_of_an_op(
    op: str, swept: dict[str, MeasuredOp], record_property: Callable[[str, object], None]
) -> None:
    """Later calls take little allocator memory. The memory of first and later uses of a size is recorded."""
    row = swept[op]
    for name in ("first_allocator", "first_driver", "later_allocator", "later_driver"):
        record_property(f"{op}_{name}_bytes", getattr(row, name))
    record_property(f"{op}_query_us", row.query_ns / 1e3)
    assert row.source == "driver" and row.calls >= 15
    assert row.later_allocator <= 64 * 2**20, "enough for 4 MiB tensors in allocator blocks of 20 MiB"
    if op == "all_reduce" and has_values():  # the first op creates the communicator outside of the allocator
        assert row.first_driver > row.first_allocator


def test_coalesced_nccl_ops_are_counted(tmp_path: Path) -> None:
    """With a device, the manager issues its collected ops as one op, ``end_coalescing``, which gloo lacks."""
    torch.cuda.set_device(DEVICE)
    wrapper = install.install(GuardSpec(wrap=True, folder=str(tmp_path), name="trainer"), DEVICE, 0)
    assert wrapper is not None
    dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1)
    try:
        tensors = [torch.arange(1024.0, device=DEVICE) for _ in range(2)]
        with c10d._coalescing_manager(device=DEVICE, async_ops=True) as works:
            for tensor in tensors:
                dist.broadcast(tensor, src=0)
        works.wait()
        torch.cuda.synchronize()
        if has_values():
            assert all(torch.equal(tensor.cpu(), torch.arange(1024.0)) for tensor in tensors)
        calls = {counter.op.name: counter.calls for counter in wrapper.counters()}
        assert calls == {"broadcast": 2, "end_coalescing": 1}
        wrapper.record_completed()
        assert len(wrapper.pending_works) == 0
    finally:
        dist.destroy_process_group()
        install.remove()


def test_nccl_ops_pass_the_wrapper(tmp_path: Path, record_property: Callable[[str, object], None]) -> None:
    """Results on one rank are unchanged; the memory that the first call of an op takes is recorded."""
    torch.cuda.set_device(DEVICE)
    spec = GuardSpec(
        wrap=True, default=MemoryPolicy(checks="always"), folder=str(tmp_path), name="trainer", release=True
    )
    wrapper = install.install(spec, DEVICE, 0)
    assert wrapper is not None
    dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1)
    try:
        source = CudaDriver(DEVICE)
        for name in ("first", "second"):
            free_before = source.free()
            tensor = torch.arange(1024.0, device=DEVICE)
            dist.all_reduce(tensor)
            torch.cuda.synchronize()
            assert not has_values() or torch.equal(tensor.cpu(), torch.arange(1024.0))
            record_property(f"all_reduce_{name}_drop_bytes", free_before - source.free())
        free_before = source.free()
        install.release()
        record_property("released_bytes", source.free() - free_before)
        with install.phase("step"):
            tensor = torch.arange(1024.0, device=DEVICE)
            dist.all_reduce(tensor)
        assert wrapper.generation == 1
        assert not has_values() or torch.equal(tensor.cpu(), torch.arange(1024.0))
        (counter,) = [c for c in wrapper.counters() if c.op.name == "all_reduce"]
        assert (counter.calls, counter.checks) == (3, 3)
    finally:
        dist.destroy_process_group()
        install.remove()
