"""Schedule of ``auto``'s free-memory queries: as often as its budget allows, sooner if memory runs out."""

from __future__ import annotations

from dataclasses import dataclass

OVERDRAFT = 16.0  # queries that may run ahead of the budget and are paid back before further ones
CAUTION = 2.0  # memory is assumed to run out this many times as fast as measured
STICKS = 0.9  # decay per query of the largest cost so far
FADE = 0.5  # decay per query of the fastest loss so far
DEAR = 4.0  # a query must cost this many cheap checks for these to be used
SHARE = 0.25  # of the budget for cheap checks


@dataclass(slots=True)
class Pace:
    """Times of the next query of free memory and, between expensive queries, of the next look at this process's memory.

    A look reads only the memory held by this process, which is cheap. Times in ns, memory in bytes. Budget: over any
    period, queries and looks cost at most the share ``budget`` of it plus ``OVERDRAFT`` queries. The next query runs before
    memory lost ``CAUTION`` times as fast as measured reaches the threshold, and immediately after a look at which this
    process has taken half of the remaining memory. If the budget allows no query in time, ``too_late`` is set and the
    guard acts immediately.
    """

    budget: float
    due: float = 0.0  # the next query or look
    question: float = 0.0
    too_late: bool = False
    _asked: float = -1.0
    _paid: float = -1.0  # the budget is credited up to this time
    _free: int = 0
    _held: int = 0
    _room: int = 0
    _loss: float = 0.0  # bytes per ns, the fastest lately
    _growth: float = 0.0  # bytes per ns by which ``held`` grew since the look before
    _seen: int = 0
    _looked: float = 0.0
    _cost: float = 0.0  # of one query
    _look: float = 0.0  # cost of one look
    _saved: float = 0.0  # ns that may be spent, negative when overdrawn

    def learn(self, now: float, cost: float, free: int, num_held: int, threshold: int, look: float) -> None:
        """Record a query at ``now`` that cost ``cost``, of which ``look`` for ``held``, and returned ``free``."""
        first = self._asked < 0
        if not first:
            loss, grown = self._free - free, num_held - self._held
            loss = (
                loss - max(grown, 0) if self._takes_looks else max(loss, grown)
            )  # growth of this process is tracked by looks
            self._loss = max(loss / max(now - self._asked, 1.0), FADE * self._loss)
        self._cost = cost if first else max(cost, STICKS * self._cost)
        self._look = look if first else max(look, STICKS * self._look)
        self._grow(now, num_held)
        self._asked, self._free, self._held, self._room = now, free, num_held, free - threshold
        self._pay(now, cost)
        self._plan(now)

    def glance(self, now: float, cost: float, num_held: int) -> None:
        """Record a look at ``now`` that cost ``cost``; schedule an immediate query if ``held`` grew too much."""
        self._pay(now, cost)
        self._look = max(cost, STICKS * self._look)
        self._grow(now, num_held)
        if 0 < self._room <= 2 * (num_held - self._held) and self._affords:
            self.question = self.due = now
        else:
            self.due = min(self.question, now + self._interval)

    def spend(self, cost: float) -> None:
        """Charge further cost to the budget."""
        self._saved = max(self._saved - cost, -OVERDRAFT * self._cost)

    @property
    def _takes_looks(self) -> bool:
        return self._look * DEAR < self._cost

    @property
    def _affords(self) -> bool:
        return self._saved - self._cost >= -OVERDRAFT * self._cost

    def _pay(self, now: float, cost: float) -> None:
        earned = self.budget * (now - self._paid) if self._paid >= 0 else 0.0
        self._saved, self._paid = min(self._saved + earned, self._cost), now
        self.spend(cost)

    def _plan(self, now: float) -> None:
        paid = now + max(0.0, self._cost - self._saved) / (self.budget * (1 - SHARE if self._takes_looks else 1))
        self.question, self.too_late = paid, False
        loss = max(self._loss, self._growth if self._takes_looks else 0.0)
        if self._room > 0 and loss > 0:
            needed = now + self._room / (CAUTION * loss)
            if needed < paid:
                if self._affords:
                    self.question = max(needed, now + self._cost)
                else:
                    self.too_late = self._room < CAUTION * self._loss * (paid - now)
        self.due = min(self.question, now + self._interval) if self._takes_looks else self.question

    @property
    def _interval(self) -> float:
        """Time between two looks."""
        return self._look / (SHARE * self.budget)

    def _grow(self, now: float, num_held: int) -> None:
        passed = max(now - self._looked, self._interval / 4, 1.0)  # one large tensor is no trend
        self._growth = max((num_held - self._seen) / passed, FADE * self._growth) if self._looked else 0.0
        self._looked, self._seen = now, num_held
