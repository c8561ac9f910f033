"""Schedule of the free-memory queries of ``guard.checks=auto``.

Queries take a limited share of the time. If free memory may soon reach the threshold, they run ahead of that budget, up
to an overdraft.
"""

from __future__ import annotations

from dataclasses import dataclass

MAX_OVERDRAFT = 16.0  # queries that may run ahead of the budget; later queries wait until their cost is earned
SAFETY_FACTOR = 2.0  # memory is assumed to shrink this many times as fast as measured
COST_DECAY = 0.9  # decay of the maximum cost, per query or check
RATE_DECAY = 0.5  # decay of the maximum rate at which memory shrinks, per query or check
MIN_COST_RATIO = 4.0  # cheap checks are used if a query costs more than this many of them
CHEAP_CHECK_SHARE = 0.25  # share of the budget that cheap checks may use


@dataclass(slots=True)
class QuerySchedule:
    """Time of the next free-memory query and, if queries are expensive, of the next cheap check before it.

    A query reads the free memory. A cheap check reads only the memory held by this process
    (``MemorySource.process_bytes``). Times are in ns, memory is in bytes.

    - Over a long period, queries and cheap checks cost at most the share ``budget`` of the time. A shorter period may
      cost about ``MAX_OVERDRAFT`` queries more.
    - The next query runs before free memory can reach the threshold at ``SAFETY_FACTOR`` times the measured rate, or
      immediately if a cheap check shows that this process has taken half of the headroom. It runs later if it would
      exceed the overdraft.
    - If the overdraft allows no query before memory may reach the threshold, ``too_late`` is set, and the guard acts
      without waiting for a query. If cheap checks are used, the growth of this process does not count here.
    """

    budget: float
    next_reading_at: float = 0.0  # time of the next query or cheap check
    next_query_at: float = 0.0
    too_late: bool = False
    _queried_at: float = -1.0
    _balance_at: float = -1.0  # time up to which the budget has been added to ``_balance``
    _balance: float = 0.0  # ns that may be spent; negative if overdrawn
    _free_bytes: int = 0  # at the last query
    _held_at_query: int = 0
    _headroom: int = 0  # free bytes above the threshold at the last query
    _loss_rate: float = 0.0  # bytes per ns, recent maximum
    _checked_at: float = 0.0
    _held_at_check: int = 0
    _growth_rate: float = 0.0  # growth of the held memory, bytes per ns, recent maximum
    _query_cost: float = 0.0  # ns, recent maximum
    _check_cost: float = 0.0  # ns, recent maximum

    def record_query(
        self, now: float, cost: float, num_free: int, process_bytes: int, threshold: int, check_cost: float
    ) -> None:
        """Record a query at ``now`` that took ``cost`` and returned ``num_free``.

        ``cost`` includes the ``check_cost`` of reading ``process_bytes``.
        """
        first = self._queried_at < 0
        if not first:
            loss, growth = self._free_bytes - num_free, process_bytes - self._held_at_query
            # With cheap checks, the growth of this process has a separate rate.
            loss = loss - max(growth, 0) if self._uses_cheap_checks else max(loss, growth)
            self._loss_rate = max(loss / max(now - self._queried_at, 1.0), RATE_DECAY * self._loss_rate)
        self._query_cost = cost if first else max(cost, COST_DECAY * self._query_cost)
        self._check_cost = check_cost if first else max(check_cost, COST_DECAY * self._check_cost)
        self._update_growth_rate(now, process_bytes)
        self._queried_at, self._free_bytes, self._held_at_query = now, num_free, process_bytes
        self._headroom = num_free - threshold
        self._update_balance(now, cost)
        self._schedule_query(now)

    def record_cheap_check(self, now: float, cost: float, process_bytes: int) -> None:
        """Record a cheap check at ``now`` that took ``cost``.

        Schedule the next query for ``now`` if ``process_bytes`` has grown by half of the headroom since the last query (if
        there was any headroom) and the overdraft allows a query.
        """
        self._update_balance(now, cost)
        self._check_cost = max(cost, COST_DECAY * self._check_cost)
        self._update_growth_rate(now, process_bytes)
        if 0 < self._headroom <= 2 * (process_bytes - self._held_at_query) and self._can_afford_query:
            self.next_query_at = self.next_reading_at = now
        else:
            self.next_reading_at = min(self.next_query_at, now + self._check_interval)

    def charge(self, cost: float) -> None:
        """Charge ``cost`` to the budget. The overdraft does not exceed ``MAX_OVERDRAFT`` queries."""
        self._balance = max(self._balance - cost, -MAX_OVERDRAFT * self._query_cost)

    @property
    def _uses_cheap_checks(self) -> bool:
        return self._check_cost * MIN_COST_RATIO < self._query_cost

    @property
    def _can_afford_query(self) -> bool:
        """Return whether an immediate query stays within the overdraft."""
        return self._balance - self._query_cost >= -MAX_OVERDRAFT * self._query_cost

    @property
    def _check_interval(self) -> float:
        """Time between two cheap checks."""
        return self._check_cost / (CHEAP_CHECK_SHARE * self.budget)

    def _update_balance(self, now: float, cost: float) -> None:
        """Add the budget earned since the last update, cap the balance at the cost of one query, and charge ``cost``."""
        allowance = self.budget * (now - self._balance_at) if self._balance_at >= 0 else 0.0
        self._balance, self._balance_at = min(self._balance + allowance, self._query_cost), now
        self.charge(cost)

    def _schedule_query(self, now: float) -> None:
        query_budget = self.budget * (1 - CHEAP_CHECK_SHARE if self._uses_cheap_checks else 1)
        affordable_at = now + max(0.0, self._query_cost - self._balance) / query_budget
        self.next_query_at, self.too_late = affordable_at, False
        loss_rate = max(self._loss_rate, self._growth_rate if self._uses_cheap_checks else 0.0)
        if self._headroom > 0 and loss_rate > 0:
            needed_at = now + self._headroom / (SAFETY_FACTOR * loss_rate)
            if needed_at < affordable_at:
                if self._can_afford_query:
                    self.next_query_at = max(needed_at, now + self._query_cost)
                else:
                    self.too_late = self._headroom < SAFETY_FACTOR * self._loss_rate * (affordable_at - now)
        self.next_reading_at = self.next_query_at
        if self._uses_cheap_checks:
            self.next_reading_at = min(self.next_query_at, now + self._check_interval)

    def _update_growth_rate(self, now: float, process_bytes: int) -> None:
        elapsed = max(now - self._checked_at, self._check_interval / 4, 1.0)  # one large tensor is not a trend
        growth_rate = max((process_bytes - self._held_at_check) / elapsed, RATE_DECAY * self._growth_rate)
        self._growth_rate = growth_rate if self._checked_at else 0.0
        self._checked_at, self._held_at_check = now, process_bytes
