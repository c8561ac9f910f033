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


def one_by_one() -> Callable[[], int]:
    """Return a function that counts its calls from 1."""
    return itertools.count(1).__next__


class Group:
    """A process group on this rank. Mutable, without dataclass: it changes with every op."""

    __slots__ = ("info", "next", "numbers")

    def __init__(self, info: GroupInfo, numbers: Callable[[], Callable[[], int]] = one_by_one) -> None:
        """``numbers``: ``one_by_one``, or its equivalent in ``csrc/tally.h``."""
        self.info, self.numbers = info, numbers
        self.next = numbers()  # the number of its next collective


class Counter:
    """One op in one group. Mutable: the wrapper adds to it with every call. ``counter_type`` makes its classes."""

    __slots__ = tuple[str, ...]()

    # Changed by every op.
    calls: int
    bytes: int
    ns: int  # in the op and in waiting for it, on this rank's thread
    due: float  # time of the guard's next check, in ns of perf_counter_ns
    code: int  # op, phase and group, as the ring has them
    next: Callable[[], int]  # the number of its next collective
    peers: dict[int, Callable[[], int]]  # the number of its next send to, or receive from, each peer
    target: Any  # the ProcessGroup that carries out its calls
    # Changed by checks only.
    op: Op
    group: Group
    policy: MemoryPolicy
    checks: int
    check_ns: int
    shortages: int
    clears: int
    clear_ns: int
    freed: int
    reported: tuple[int, ...]

    def __init__(self, op: Op, group: Group, policy: MemoryPolicy, code: int) -> None:
        self.op, self.group, self.policy, self.code = op, group, policy, code
        self.next, self.peers, self.target = group.next, {}, None
        self.due = 0
        self.calls = self.bytes = self.ns = 0
        self.checks = self.check_ns = self.shortages = self.clears = self.clear_ns = self.freed = 0
        self.reported = (0,) * 9

    def meet(self, peer: int) -> int:
        """Return the number of the first send to, or receive from, ``peer``."""
        self.peers[peer] = self.group.numbers()
        return self.peers[peer]()

    def fresh(self) -> tuple[int, ...]:
        """Return the increments since the last call."""
        now = (
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
        new = tuple(a - b for a, b in zip(now, self.reported, strict=True))
        self.reported = now
        return new


HOT = ("bytes", "calls", "code", "due", "next", "ns", "peers", "target")
COLD = tuple(name for name in Counter.__annotations__ if name not in HOT)


class Tally:
    """The fields that change with every op; ``csrc/tally.h`` defines the same type in C."""

    __slots__ = HOT


@functools.cache
def counter_type(tally: type = Tally) -> type[Counter]:
    """Return a counter class on top of ``tally``, which holds the fields that change with every op."""
    return type("Counter", (Counter, tally), {"__slots__": COLD})


def metrics(counters: Iterable[Counter], lowest: int | None) -> Iterator[Metric]:
    """Yield ``comm/...`` and ``guard/...`` of one rank since the last call. Over ranks counts are summed, times are not."""
    named: dict[str, list[int]] = {}  # two groups may have one label
    for counter in counters:
        totals_so_far = named.setdefault(f"{counter.group.info.label}/{counter.op.name}", [0] * 9)
        named[f"{counter.group.info.label}/{counter.op.name}"] = [
            a + b for a, b in zip(totals_so_far, counter.fresh(), strict=True)
        ]
    for name, (calls, size, ns, checks, check_ns, _, clears, _, freed) in named.items():
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
    totals = [sum(values) for values in zip(*named.values(), strict=True)] or [0] * 9
    _, _, _, checks, check_ns, shortages, clears, clear_ns, freed = totals
    yield Sum("guard/checks", checks)
    yield Max("guard/time", (check_ns + clear_ns) / 1e9)
    yield Sum("guard/shortages", shortages)
    yield Sum("guard/clears", clears)
    yield Sum("guard/freed_bytes", freed)
    if lowest is not None:
        yield Min("guard/free_bytes", lowest)
