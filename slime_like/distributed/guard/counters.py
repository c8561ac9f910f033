"""Counters of each op in each process group of a rank, and their metrics."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from slime_like.config.schema.collectives import Op
from slime_like.config.schema.guard_policy import MemoryPolicy
from slime_like.distributed.forensics.ring import GroupInfo
from slime_like.metrics.types import Max, Metric, Min, Sum


def sequence_counter() -> Callable[[], int]:
    """Return a function that counts its calls from 1."""
    return itertools.count(1).__next__


class GroupRecord:
    """A process group on this rank, with the sequence counter that numbers its collectives."""

    __slots__ = ("info", "make_sequence", "next_sequence")

    def __init__(self, info: GroupInfo, make_sequence: Callable[[], Callable[[], int]] = sequence_counter) -> None:
        """Create the record. ``make_sequence``: ``sequence_counter``, or its equivalent in ``wrapper/csrc/hot_counter.h``."""
        self.info, self.make_sequence = info, make_sequence
        self.next_sequence = make_sequence()


class Counter:
    """Counts of one op in one group. The wrapper and the guard update them. ``counter_type`` creates its subclasses."""

    __slots__ = tuple[str, ...]()

    # Read or changed by every op.
    calls: int
    bytes: int
    ns: int  # in the op and in the wait for it, on the calling thread
    check_at: float  # the guard checks the first op issued at or after this time, in ns of perf_counter_ns
    code: int  # op, phase and group, encoded as in the ring
    next_sequence: Callable[[], int]  # returns the number of the group's next collective
    peers: dict[int, Callable[[], int]]  # peer -> function that numbers the sends to it (or receives from it)
    target: Any  # the ProcessGroup that executes the op
    # Set at creation or changed only by the guard.
    op: Op
    group: GroupRecord
    policy: MemoryPolicy
    checks: int
    check_ns: int
    shortages: int
    clears: int
    clear_ns: int
    freed: int
    last_totals: tuple[int, ...]  # at the last call of ``increments``

    def __init__(self, op: Op, group: GroupRecord, policy: MemoryPolicy, code: int) -> None:
        self.op, self.group, self.policy, self.code = op, group, policy, code
        self.next_sequence, self.peers, self.target = group.next_sequence, {}, None
        self.check_at = 0
        self.calls = self.bytes = self.ns = 0
        self.checks = self.check_ns = self.shortages = self.clears = self.clear_ns = self.freed = 0
        self.last_totals = (0,) * 9

    def add_peer(self, peer: int) -> int:
        """Start numbering the sends to (or receives from) ``peer``; return the first number."""
        self.peers[peer] = self.group.make_sequence()
        return self.peers[peer]()

    def increments(self) -> tuple[int, ...]:
        """Return the growth of each count since ``increments`` was last called, in the order in which ``metrics`` unpacks it."""
        totals = (
            self.calls,
            self.bytes,
            self.ns,
            self.checks,
            self.check_ns,
            self.shortages,
            self.clears,
            self.clear_ns,
            self.freed,
        )
        increments = tuple(a - b for a, b in zip(totals, self.last_totals, strict=True))
        self.last_totals = totals
        return increments


HOT_FIELDS = ("bytes", "calls", "check_at", "code", "next_sequence", "ns", "peers", "target")
OTHER_FIELDS = tuple(name for name in Counter.__annotations__ if name not in HOT_FIELDS)


class HotCounterFields:
    """Fields of a ``Counter`` that every op reads or changes; ``wrapper/csrc/hot_counter.h`` defines the same type in C."""

    __slots__ = HOT_FIELDS


@functools.cache
def counter_type(hot_fields: type = HotCounterFields) -> type[Counter]:
    """Return a subclass of ``Counter`` whose hot fields are those of ``hot_fields``."""
    return type("Counter", (Counter, hot_fields), {"__slots__": OTHER_FIELDS})


def metrics(counters: Iterable[Counter], min_free: int | None) -> Iterator[Metric]:
    """Yield the metrics ``comm/...`` and ``guard/...`` of one rank since ``metrics`` was last called.

    The driver adds up the counts of all ranks, and keeps the longest times. ``min_free``: lowest free memory in bytes.
    """
    sums: dict[str, list[int]] = {}  # by group label and op: several groups may have one label
    for counter in counters:
        name = f"{counter.group.info.label}/{counter.op.name}"
        sums[name] = [a + b for a, b in zip(sums.get(name, [0] * 9), counter.increments(), strict=True)]
    for name, (calls, size, ns, checks, check_ns, _, clears, _, freed) in sums.items():
        if not calls:
            continue
        yield Sum(f"comm/{name}/calls", calls)
        yield Sum(f"comm/{name}/bytes", size)
        yield Max(f"comm/{name}/time", ns / 1e9)
        if checks:
            yield Sum(f"comm/{name}/checks", checks)
            yield Max(f"comm/{name}/check_time", check_ns / 1e9)
        if clears:
            yield Sum(f"comm/{name}/clears", clears)
            yield Sum(f"comm/{name}/freed_bytes", freed)
    totals = [sum(values) for values in zip(*sums.values(), strict=True)] or [0] * 9
    _, _, _, checks, check_ns, shortages, clears, clear_ns, freed = totals
    yield Sum("guard/checks", checks)
    yield Max("guard/time", (check_ns + clear_ns) / 1e9)
    yield Sum("guard/shortages", shortages)
    yield Sum("guard/clears", clears)
    yield Sum("guard/freed_bytes", freed)
    if min_free is not None:
        yield Min("guard/free_bytes", min_free)
