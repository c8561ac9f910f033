"""Memory check before an op, and the action on a shortage."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

from slime_like.config.schema.guard_policy import MemoryPolicy
from slime_like.distributed.guard.counters import Counter
from slime_like.distributed.guard.memory import MemorySource
from slime_like.distributed.guard.pace import Pace
from slime_like.distributed.guard.requests import Requests
from slime_like.errors import MemoryShortage

NEVER = (1 << 63) - 1


@dataclass(slots=True)
class Guard:
    """The guard of one rank. ``check`` is called before an op whose counter is due, and sets its next due time."""

    source: MemorySource
    requests: Requests | None = None  # for group decisions
    lowest: int | None = None  # free memory, since the last drain
    last: int | None = None  # free memory at the last query
    _counters: list[Counter] = field(default_factory=list[Counter])
    _paces: dict[MemoryPolicy, Pace] = field(default_factory=dict[MemoryPolicy, Pace])
    _resting: set[MemoryPolicy] = field(default_factory=set[MemoryPolicy])  # acted, and memory has not recovered since

    def adopt(self, counter: Counter) -> None:
        """Register a new counter."""
        self._counters.append(counter)
        pace = self._paces.get(counter.policy) if counter.policy.checks == "auto" else None
        if self._polls:
            counter.due = 0
        elif pace is not None:  # ops inside a composite are not checked and would stay due
            counter.due = pace.due
        else:
            counter.due = NEVER if counter.policy.checks == "never" else 0

    def forget(self, counter: Counter) -> None:
        """Unregister a counter whose group was destroyed."""
        self._counters.remove(counter)

    @property
    def _polls(self) -> bool:
        """True if ``check`` must run before every op, because requests are seen only there."""
        return self.requests is not None and not self.requests.watched

    def check(self, counter: Counter, now: int) -> None:
        """Query memory if it is time to, and act by the op's policy. Raises ``MemoryShortage`` under ``action=raise``."""
        if self.requests is not None and (request := self.requests.news()):
            self._act(counter, request, f"requested by another rank ({self.source.name} memory)")
        policy = counter.policy
        match policy.checks:
            case "never":
                counter.due = 0 if self._polls else NEVER
            case "every_n" if (counter.calls - 1) % policy.every:
                return
            case "auto" if not self._is_time(counter, self._pace(policy), now):
                return
            case _:
                self._ask(counter, policy)

    def _is_time(self, counter: Counter, pace: Pace, now: int) -> bool:
        """Return True if ``auto`` queries now; may first check the memory held by this process."""
        if pace.due <= now < pace.question:
            started = time.perf_counter_ns()
            num_held = self.source.held()
            pace.glance(started, time.perf_counter_ns() - started, num_held)
            self._share(counter.policy, pace)
            counter.check_ns += time.perf_counter_ns() - started
        if now < pace.question:
            counter.due = 0 if self._polls else pace.due
            return False
        return True

    def _share(self, policy: MemoryPolicy, pace: Pace) -> None:
        """Set the due time of all counters of a policy."""
        started = time.perf_counter_ns()
        for registered in () if self._polls else self._counters:
            if registered.policy is policy or registered.policy == policy:
                registered.due = pace.due
        pace.spend(time.perf_counter_ns() - started)

    def _pace(self, policy: MemoryPolicy) -> Pace:
        pace = self._paces.get(policy)
        if pace is None:
            pace = self._paces[policy] = Pace(policy.budget)
        return pace

    def _ask(self, counter: Counter, policy: MemoryPolicy) -> None:
        started = time.perf_counter_ns()
        free, threshold = self.source.free(), policy.threshold.of(self.source.total)
        short = free < threshold
        if policy.checks == "auto":
            pace, held_started = self._pace(policy), time.perf_counter_ns()
            num_held = self.source.held()
            ended = time.perf_counter_ns()
            pace.learn(started, ended - started, free, num_held, threshold, ended - held_started)
            short = short or pace.too_late
            self._share(policy, pace)
        self.last = free
        self.lowest = free if self.lowest is None else min(self.lowest, free)
        counter.checks += 1
        counter.check_ns += time.perf_counter_ns() - started
        if free >= threshold * (1 + policy.hysteresis):
            self._resting.discard(policy)
        if short and not (policy.checks in ("below", "auto") and policy in self._resting):
            self._resting.add(policy)
            if self.requests is not None and policy.action != "none":
                self.requests.ask(policy.action)
            self._act(counter, policy.action, f"threshold {policy.threshold}")

    def _act(self, counter: Counter, action: str, reason: str) -> None:
        """Perform ``action`` on this rank."""
        started, free_before = time.perf_counter_ns(), self.source.free()
        counter.shortages += 1
        match action:
            case "trim":
                self.source.trim()
            case "clear":
                self.source.clear()
            case "raise":
                raise MemoryShortage(
                    f"{free_before / 2**30:.2f} GiB of {self.source.name} memory are free before {counter.op.name} in group "
                    f"{counter.group.info.label}: {reason}, guard.action=raise; lower parallel.max_tokens_per_rank or the "
                    "engines' share, or set guard.action=clear"
                )
            case _:
                return
        counter.clears += 1
        counter.freed += max(0, self.source.free() - free_before)
        counter.clear_ns += time.perf_counter_ns() - started
