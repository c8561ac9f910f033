"""How often ``auto`` asks for free memory: as often as its budget pays for, sooner where memory runs out."""

from __future__ import annotations

from dataclasses import dataclass

OVERDRAFT = 30.0  # questions that may be asked ahead of the budget, and are paid back before it pays for others
CAUTION = 2.0  # memory may run out this many times as fast as it has so far
FADE = 0.9  # of the fastest loss seen so far, from question to question


@dataclass(slots=True)
class Pace:
    """The next question's time. Times in ns, memory in bytes.

    Budget: over any time, questions cost at most ``budget`` of it and ``OVERDRAFT`` questions. Foresight: the next
    question comes before memory that is lost ``CAUTION`` times as fast as before reaches the threshold; where the
    budget does not pay for that, ``too_late`` says so and the guard acts at once.
    """

    budget: float
    due: float = 0.0
    too_late: bool = False
    _asked: float = -1.0
    _free: int = 0
    _held: int = 0
    _loss: float = 0.0  # bytes per ns
    _cost: float = 0.0  # of one question
    _saved: float = 0.0  # ns that may be spent, negative when overdrawn

    def learn(self, now: float, cost: float, free: int, held: int, threshold: int) -> None:
        """A question at ``now`` cost ``cost`` and found ``free``; when to ask again."""
        if self._asked >= 0:
            passed = max(now - self._asked, 1.0)
            lost = max(self._free - free, held - self._held, 0) / passed
            self._loss = max(lost, FADE * self._loss)
            self._saved += self.budget * passed
        self._cost = cost if self._asked < 0 else max(cost, FADE * self._cost)
        self._saved = max(min(self._saved, self._cost) - cost, -OVERDRAFT * self._cost)
        self._asked, self._free, self._held = now, free, held
        paid = now + max(0.0, self._cost - self._saved) / self.budget
        self.due, self.too_late = paid, False
        room = free - threshold
        if room > 0 and self._loss > 0:
            needed = now + room / (CAUTION * self._loss) / 2
            if needed < paid:
                if self._saved - self._cost >= -OVERDRAFT * self._cost:
                    self.due = max(needed, now + self._cost)
                else:
                    self.too_late = free - CAUTION * self._loss * (paid - now) < threshold
