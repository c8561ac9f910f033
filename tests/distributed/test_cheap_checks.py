"""Cheap checks of ``auto`` by the memory guard: when they make it query free memory."""

from __future__ import annotations

import pytest

from slime_like.config.schema.collectives import canonical
from slime_like.config.schema.guard_policy import MemoryPolicy
from slime_like.distributed.forensics.ring import GroupInfo
from slime_like.distributed.guard import memory_guard
from slime_like.distributed.guard.counters import GroupRecord, counter_type
from slime_like.distributed.guard.memory_guard import Guard

GIB = 2**30
QUERY_NS, CHECK_NS = 8_000_000, 50_000


class ExpensiveSource:
    """Memory source whose queries and cheap checks take ``QUERY_NS`` and ``CHECK_NS`` of a simulated clock."""

    name = "simulated"
    total = 64 * GIB

    def __init__(self) -> None:
        self.now = 1
        self.held = 0
        self.query_times: list[int] = []

    def clock(self) -> int:
        return self.now

    def free(self) -> int:
        self.query_times.append(self.now)
        self.now += QUERY_NS
        return self.total - self.held

    def process_bytes(self) -> int:
        self.now += CHECK_NS
        return self.held

    def trim(self) -> None: ...

    def clear(self) -> None: ...


def test_a_cheap_check_that_makes_a_query_due_queries_before_the_same_op(monkeypatch: pytest.MonkeyPatch) -> None:
    source = ExpensiveSource()
    monkeypatch.setattr(memory_guard.time, "perf_counter_ns", source.clock)
    guard, policy = Guard(source), MemoryPolicy(checks="auto")
    counter = counter_type()(canonical("test", "all_reduce"), GroupRecord(GroupInfo(0, "1", "tp", (0, 1))), policy, 0)
    guard.add_counter(counter)
    guard.check(counter, source.now)
    assert len(source.query_times) == 1
    source.held = source.total - 4 * GIB  # more than half of the memory above the threshold
    source.now = op_ns = int(counter.check_at)
    source.now += 100  # the guard reads the clock after the wrapper
    guard.check(counter, op_ns)
    assert source.query_times[1:] == [op_ns + 100 + CHECK_NS]
