"""Memory check before an op, and the action if free memory is below the threshold."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

from slime_like.config.schema.guard_policy import MemoryPolicy
from slime_like.distributed.guard.counters import Counter
from slime_like.distributed.guard.memory import MemorySource
from slime_like.distributed.guard.query_schedule import QuerySchedule
from slime_like.distributed.guard.symmetric_actions import SymmetricActions
from slime_like.errors import MemoryShortage

NEVER = (1 << 63) - 1  # a ``check_at`` that is not reached


@dataclass(slots=True)
class Guard:
    """The memory guard of one rank. The wrapper calls ``check`` before an op once the counter's ``check_at`` has passed."""

    source: MemorySource
    symmetric_actions: SymmetricActions | None = None  # actions shared by all ranks (guard.symmetric)
    min_free: int | None = None  # lowest free memory since the last drain
    _counters: list[Counter] = field(default_factory=list[Counter])
    _schedules: dict[MemoryPolicy, QuerySchedule] = field(default_factory=dict[MemoryPolicy, QuerySchedule])
    # Policies that acted on a shortage and whose memory has not recovered since.
    _in_shortage: set[MemoryPolicy] = field(default_factory=set[MemoryPolicy])

    def add_counter(self, counter: Counter) -> None:
        """Register a new counter, and set its ``check_at``."""
        self._counters.append(counter)
        schedule = self._schedules.get(counter.policy) if counter.policy.checks == "auto" else None
        if self._polls_requests:
            counter.check_at = 0
        elif schedule is not None:  # 0 would keep ops inside a composite, which are not checked, off the fast path
            counter.check_at = schedule.next_reading_at
        else:
            counter.check_at = NEVER if counter.policy.checks == "never" else 0

    def remove_counter(self, counter: Counter) -> None:
        """Unregister a counter whose group was destroyed."""
        self._counters.remove(counter)

    @property
    def _polls_requests(self) -> bool:
        """Return whether ``check`` must run before every op because nothing else notices requests of other ranks."""
        return self.symmetric_actions is not None and not self.symmetric_actions.is_watched

    def check(self, counter: Counter, now: int) -> None:
        """Act on a request of another rank; query free memory if the op's policy requires it; act on a shortage.

        Under ``auto`` and ``never``, set ``counter.check_at``. Raises ``MemoryShortage`` if the action is ``raise``.
        """
        if self.symmetric_actions is not None and (action := self.symmetric_actions.next_action()):
            self._act(counter, action, f"requested by another rank ({self.source.name} memory)")
        policy = counter.policy
        match policy.checks:
            case "never":
                counter.check_at = 0 if self._polls_requests else NEVER
            case "every_n" if (counter.calls - 1) % policy.every:
                return
            case "auto" if not self._should_query(counter, self._schedule(policy), now):
                return
            case _:
                self._query(counter, policy)

    def _should_query(self, counter: Counter, schedule: QuerySchedule, now: int) -> bool:
        """Return whether a query is due under ``auto``. If a cheap check is due, run it first: it may make a query due.

        If no query is due, set ``counter.check_at``.
        """
        if schedule.next_reading_at <= now < schedule.next_query_at:
            now = time.perf_counter_ns()
            process_bytes = self.source.process_bytes()
            schedule.record_cheap_check(now, time.perf_counter_ns() - now, process_bytes)
            self._set_check_times(counter.policy, schedule)
            counter.check_ns += time.perf_counter_ns() - now
        if now < schedule.next_query_at:
            counter.check_at = 0 if self._polls_requests else schedule.next_reading_at
            return False
        return True

    def _set_check_times(self, policy: MemoryPolicy, schedule: QuerySchedule) -> None:
        """Set ``check_at`` of all counters with this policy to the time of the schedule's next query or cheap check.

        Leave the counters unchanged if every op is checked (``_polls_requests``). Charge the schedule for the time this takes.
        """
        start_ns = time.perf_counter_ns()
        for counter in () if self._polls_requests else self._counters:
            if counter.policy is policy or counter.policy == policy:
                counter.check_at = schedule.next_reading_at
        schedule.charge(time.perf_counter_ns() - start_ns)

    def _schedule(self, policy: MemoryPolicy) -> QuerySchedule:
        schedule = self._schedules.get(policy)
        if schedule is None:
            schedule = self._schedules[policy] = QuerySchedule(policy.budget)
        return schedule

    def _query(self, counter: Counter, policy: MemoryPolicy) -> None:
        """Query free memory, update the schedule under ``auto``, and act on a shortage.

        Under ``auto`` and ``below``, act once per policy, then again only after a query has found ``1 + hysteresis`` times the
        threshold free. Raises ``MemoryShortage`` if the action is ``raise``.
        """
        start_ns = time.perf_counter_ns()
        num_free, threshold = self.source.free(), policy.threshold.in_bytes(self.source.total)
        is_short = num_free < threshold
        if policy.checks == "auto":
            schedule, held_started = self._schedule(policy), time.perf_counter_ns()
            process_bytes = self.source.process_bytes()
            end_ns = time.perf_counter_ns()
            schedule.record_query(
                start_ns, end_ns - start_ns, num_free, process_bytes, threshold, end_ns - held_started
            )
            is_short = is_short or schedule.too_late
            self._set_check_times(policy, schedule)
        self.min_free = num_free if self.min_free is None else min(self.min_free, num_free)
        counter.checks += 1
        counter.check_ns += time.perf_counter_ns() - start_ns
        if num_free >= threshold * (1 + policy.hysteresis):
            self._in_shortage.discard(policy)
        if is_short and not (policy.checks in ("below", "auto") and policy in self._in_shortage):
            self._in_shortage.add(policy)
            if self.symmetric_actions is not None and policy.action != "none":
                self.symmetric_actions.publish(policy.action)
            self._act(counter, policy.action, f"threshold {policy.threshold}")

    def _act(self, counter: Counter, action: str, reason: str) -> None:
        """Perform ``action`` on this rank. Raises ``MemoryShortage`` if it is ``raise``."""
        start_ns, free_before = time.perf_counter_ns(), self.source.free()
        counter.shortages += 1
        match action:
            case "trim":
                self.source.trim()
            case "clear":
                self.source.clear()
            case "raise":
                raise MemoryShortage(
                    f"{free_before / 2**30:.2f} GiB of {self.source.name} memory are free before {counter.op.name} in group "
                    f"{counter.group.info.label} ({reason}; guard.action=raise): lower parallel.max_tokens_per_rank or "
                    "rollout.sglang.mem_fraction_static, or set guard.action=clear"
                )
            case _:
                return
        counter.clears += 1
        counter.freed += max(0, self.source.free() - free_before)
        counter.clear_ns += time.perf_counter_ns() - start_ns
