"""How often ``auto`` asks for free memory: as often as its budget pays for, sooner where memory runs out."""

from __future__ import annotations

from dataclasses import dataclass

OVERDRAFT = 16.0  # questions that may be asked ahead of the budget, and are paid back before it pays for others
CAUTION = 2.0  # memory may run out this many times as fast as it has so far
STICKS = 0.9  # of the dearest cost so far, from one to the next
FADE = 0.5  # of the fastest loss seen so far, from question to question
DEAR = 4.0  # looks that a question must cost for any to be taken
SHARE = 0.25  # of the budget that looks may take


@dataclass(slots=True)
class Pace:
    """When to ask next, and between dear questions when to look at what this process holds. Times in ns, memory in bytes.

    Budget: over any time, questions and looks cost at most ``budget`` of it and ``OVERDRAFT`` questions. Foresight: the
    next question comes before memory that is lost ``CAUTION`` times as fast as before reaches the threshold, and at once
    where a look finds that this process took half of the room that the last question found. Where the budget pays for no
    question in time, ``too_late`` says so and the guard acts at once.
    """

    budget: float
    due: float = 0.0  # the next question or look
    question: float = 0.0
    too_late: bool = False
    _asked: float = -1.0
    _paid: float = -1.0  # until when the budget was credited
    _free: int = 0
    _held: int = 0
    _room: int = 0
    _loss: float = 0.0  # bytes per ns, the fastest lately
    _growth: float = 0.0  # bytes per ns by which ``held`` grew since the look before
    _seen: int = 0
    _looked: float = 0.0
    _cost: float = 0.0  # of one question
    _look: float = 0.0  # cost of one look
    _saved: float = 0.0  # ns that may be spent, negative when overdrawn

    def learn(self, now: float, cost: float, free: int, held: int, threshold: int, look: float) -> None:
        """A question at ``now`` cost ``cost``, of which ``look`` for ``held``, and found ``free``."""
        first = self._asked < 0
        if not first:
            lost, grown = self._free - free, held - self._held
            lost = lost - max(grown, 0) if self._takes_looks else max(lost, grown)  # what looks see is left to them
            self._loss = max(lost / max(now - self._asked, 1.0), FADE * self._loss)
        self._cost = cost if first else max(cost, STICKS * self._cost)
        self._look = look if first else max(look, STICKS * self._look)
        self._grow(now, held)
        self._asked, self._free, self._held, self._room = now, free, held, free - threshold
        self._pay(now, cost)
        self._plan(now)

    def glance(self, now: float, cost: float, held: int) -> None:
        """A look at ``now`` cost ``cost``; plans a question at once if too much is held since the last."""
        self._pay(now, cost)
        self._look = max(cost, STICKS * self._look)
        self._grow(now, held)
        if 0 < self._room <= 2 * (held - self._held) and self._affords:
            self.question = self.due = now
        else:
            self.due = min(self.question, now + self._interval)

    def spend(self, cost: float) -> None:
        """What was spent beside a question or look."""
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
        """From look to look."""
        return self._look / (SHARE * self.budget)

    def _grow(self, now: float, held: int) -> None:
        passed = max(now - self._looked, self._interval / 4, 1.0)  # one large tensor is no trend
        self._growth = max((held - self._seen) / passed, FADE * self._growth) if self._looked else 0.0
        self._looked, self._seen = now, held
