"""Wrapper in one process, without communication: errors of callers, and works that nobody waits for."""

from __future__ import annotations

import weakref
from collections.abc import Generator
from pathlib import Path
from time import perf_counter_ns as clock
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import FakeWork
from torch.testing._internal.distributed.fake_pg import FakeStore

from slime_like.config.schema.guard_policy import GuardSpec, MemoryPolicy
from slime_like.distributed.forensics.ring import HEAD, RECORD
from slime_like.distributed.guard.advice import read_rows
from slime_like.distributed.wrapper import hot, install
from slime_like.distributed.wrapper.watchdog import oldest_in_flight
from slime_like.distributed.wrapper.wrapper import MAX_PENDING, Wrapper

CPU = torch.device("cpu")


@pytest.fixture(params=[True, False], ids=["in C", "in Python"])
def wrapper(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Generator[Wrapper]:
    if request.param and hot.load() is None:
        pytest.skip("no C compiler, or no headers of this Python")
    monkeypatch.delattr(FakeWork, "wait")  # waits like works of gloo and NCCL
    wrapper = install.install(
        GuardSpec(wrap=True, default=MemoryPolicy(checks="never"), ring=64), CPU, 0, in_c=request.param
    )
    assert wrapper is not None
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    try:
        yield wrapper
    finally:
        dist.destroy_process_group()
        install.remove()


def test_a_callers_error_is_unchanged_and_not_in_flight(wrapper: Wrapper) -> None:
    dist.all_reduce(torch.zeros(2))
    group = dist.group.WORLD
    assert group is not None
    with pytest.raises(TypeError):
        group.allreduce("nothing")  # pyright: ignore[reportArgumentType, reportCallIssue]
    with pytest.raises(TypeError):
        group.send("nothing", 1, 0)  # pyright: ignore[reportArgumentType, reportCallIssue]
    with pytest.raises((TypeError, ValueError, AttributeError, IndexError)):
        dist.broadcast_object_list(3, src=0)  # pyright: ignore[reportArgumentType]
    assert oldest_in_flight(wrapper) is None


def dead_reference() -> Any:
    """Return a reference to a dead object."""
    return weakref.ref(torch.zeros(1))


def test_works_that_nobody_waits_for_are_forgotten(wrapper: Wrapper) -> None:
    for _ in range(100):
        dist.all_reduce(torch.zeros(2), async_op=True)
    wrapper.record_completed()
    assert len(wrapper.pending_works) == 0
    (counter,) = wrapper.counters()
    for key in range(MAX_PENDING + 1):
        wrapper.pending_works[key] = (dead_reference(), counter, -1)
    pending = dist.all_reduce(torch.zeros(2), async_op=True)
    assert [key for key, _ in wrapper.pending_works.items()] == [id(pending)]
    assert pending is not None
    pending.wait()
    dist.all_reduce(torch.zeros(2), async_op=True)
    wrapper.record_completed()
    assert len(wrapper.pending_works) == 0
    assert oldest_in_flight(wrapper) is None


def test_a_work_with_a_reused_id_is_not_timed(wrapper: Wrapper) -> None:
    dist.isend(torch.zeros(2), 1)
    (counter,) = wrapper.counters()
    ns_before, second = counter.ns, FakeWork()
    wrapper.pending_works[id(second)] = (dead_reference(), counter, 0)
    second.wait()
    assert counter.ns == ns_before
    assert id(second) not in wrapper.pending_works


def test_other_references_to_a_work_are_kept(wrapper: Wrapper) -> None:
    """The wrapper uses the shared weak reference without a callback and drops it at the wait."""
    events: list[str] = []
    for _ in range(20):
        works: list[Any] = [dist.isend(torch.zeros(2), 1) for _ in range(3)]
        bare = weakref.ref(works[0])
        reference = weakref.ref(works[1], lambda _: events.append("called"))
        assert [work.wait() for work in works] == [True] * 3
        later_works: list[Any] = [dist.isend(torch.zeros(2), 1) for _ in range(12)]
        assert (bare(), reference()) == (works[0], works[1])
        works.clear()
        assert (bare(), reference()) == (None, None)
        for pending in later_works:
            pending.wait()
            assert weakref.getweakrefcount(pending) == 0
    assert events == ["called"] * 20


def test_a_send_reads_the_size_before_its_number(wrapper: Wrapper) -> None:
    """Reading the size may run code that replaces the peer's counter, so the counter must be read afterwards."""
    dist.isend(torch.zeros(2), 1)
    (counter,) = wrapper.counters()

    class ReplacesCounter(torch.Tensor):
        @property
        def nbytes(self) -> int:  # pyright: ignore[reportIncompatibleVariableOverride]
            counter.peers[1] = wrapper.make_sequence()
            return 8

    dist.isend(torch.zeros(2).as_subclass(ReplacesCounter), 1)
    assert counter.peers[1]() == 2


def test_issue_and_wait_times_are_counted(wrapper: Wrapper) -> None:
    for call in (lambda: dist.isend(torch.zeros(2), 1), lambda: dist.all_reduce(torch.zeros(2), async_op=True)):
        call()
        totals: list[int] = []
        for _ in range(2):
            work = call()
            totals.append(sum(counter.ns for counter in wrapper.counters()))
            assert work is not None
            work.wait()
            totals.append(sum(counter.ns for counter in wrapper.counters()))
        assert totals == sorted(set(totals))


def test_recording_completed_ops_keeps_a_new_work_under_a_reused_id(wrapper: Wrapper) -> None:
    """The watchdog thread records completed ops while other threads issue ops."""
    dist.all_reduce(torch.zeros(2))
    (counter,) = wrapper.counters()
    later: Any = (lambda: counter, counter, 1)

    def drop() -> None:
        wrapper.pending_works[7] = later

    wrapper.pending_works[7] = (drop, counter, 0)  # pyright: ignore[reportArgumentType]
    wrapper.record_completed()
    assert wrapper.pending_works.pop(7) == later


class CompletedWork:
    """Work of an op that has ended."""

    def is_completed(self) -> bool:
        return True


def test_the_recorded_end_of_an_op_that_nobody_waits_for_stays(wrapper: Wrapper) -> None:
    dist.isend(torch.zeros(2), 1)
    (counter,) = wrapper.counters()
    work = CompletedWork()
    wrapper.pending_works[id(work)] = (weakref.ref(work), counter, 0)
    wrapper.record_completed()
    first = times(wrapper, 1)
    wrapper.record_completed()
    assert times(wrapper, 1) == first
    wrapper.add_pending(work, counter, 1, clock())  # a new work under the same id
    assert times(wrapper, 1) == first


def times(wrapper: Wrapper, count: int) -> list[tuple[int, int]]:
    """Return start and end times of the last ops, oldest first."""
    slots = range(wrapper.ring.slots)
    records = sorted(RECORD.unpack_from(wrapper.ring.memory, HEAD + slot * RECORD.size)[:3] for slot in slots)
    return [(begin_ns, end_ns) for _, begin_ns, end_ns in records if begin_ns][-count:]


def test_ops_of_a_batch_are_timed_within_it(wrapper: Wrapper) -> None:
    batch = [dist.P2POp(op, torch.zeros(2), 1) for op in (dist.isend, dist.irecv)]
    dist.batch_isend_irecv(batch)
    ns_before = {counter.op.name: counter.ns for counter in wrapper.counters()}
    dist.batch_isend_irecv(batch)
    durations = {counter.op.name: counter.ns - ns_before[counter.op.name] for counter in wrapper.counters()}
    (composite, end), (sends, _), (receives, _) = times(wrapper, 3)
    assert composite <= sends < receives < end
    assert durations["isend"] + durations["irecv"] < durations["batch_isend_irecv"]


def test_a_destroyed_group_is_forgotten(wrapper: Wrapper) -> None:
    group: Any = dist.new_group([0, 1])
    dist.all_reduce(torch.zeros(2), group=group)
    num_before = len(wrapper.counters())
    dist.destroy_process_group(group)
    assert len(wrapper.counters()) == num_before - 1


def test_phases_nest_and_reach_every_counter(wrapper: Wrapper) -> None:
    dist.all_reduce(torch.zeros(2))
    with install.phase("step"):
        dist.all_reduce(torch.zeros(2))
        with install.phase("save"):
            assert wrapper.phase_name == "save"
        assert wrapper.phase_name == "step"
    assert wrapper.phase_name == "start"
    (counter,) = wrapper.counters()
    assert counter.code == counter.code & ~(0xFF << 8) | wrapper.phase


def test_a_function_bound_while_wrapped_calls_torch_after_removal(wrapper: Wrapper) -> None:
    bound = dist.batch_isend_irecv
    install.remove()
    assert bound is not dist.batch_isend_irecv
    bound([dist.P2POp(dist.isend, torch.zeros(1), 1)])
    assert install.current() is None


def test_metrics_cover_the_time_since_the_last_drain(wrapper: Wrapper) -> None:
    for _ in range(3):
        dist.all_reduce(torch.zeros(4))
    first = {m.name: m.value for m in install.drain()}
    dist.all_reduce(torch.zeros(4))
    second = {m.name: m.value for m in install.drain()}
    assert (first["comm/world/all_reduce/calls"], second["comm/world/all_reduce/calls"]) == (3, 1)
    assert second["comm/world/all_reduce/bytes"] == 16
    assert second["guard/checks"] == 0
    assert "comm/world/all_reduce/calls" not in {m.name for m in install.drain()}


def test_a_composite_and_its_ops_are_both_profiled(
    tmp_path: Path,
) -> None:
    spec = GuardSpec(wrap=True, profile=str(tmp_path))
    wrapper = install.install(spec, CPU, 0)
    assert wrapper is not None
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    try:
        bound = dist.batch_isend_irecv
        for size in (2, 2, 4):
            bound([dist.P2POp(op, torch.zeros(size), 1) for op in (dist.isend, dist.irecv)])
        dist.broadcast_object_list(["what"], src=0)
        install.drain()
    finally:
        dist.destroy_process_group()
        install.remove()
    (rows,) = read_rows(tmp_path).values()
    counts = {row.op: (row.calls, row.num_bytes) for row in rows}
    assert counts["batch_isend_irecv"] == (3, 0)
    assert counts["isend"] == counts["irecv"] == (3, 32)
    assert counts["broadcast_object_list"] == (1, 0)
    assert counts["broadcast"][0] == 2  # sizes, then the data
    assert all(row.query_ns > 0 for row in rows)
    assert bound is not dist.batch_isend_irecv
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    try:
        bound([dist.P2POp(dist.isend, torch.zeros(1), 1)])  # bound while profiled: torch's own function after removal
        assert install.current() is None
    finally:
        dist.destroy_process_group()
