"""Times at which ``auto`` queries free memory, over courses of memory and query costs."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slime_like.distributed.guard.pace import OVERDRAFT, SHARE, Pace

GIB = 2**30
LEAST, ROOM, BUDGET = 3 * GIB, 70.0 * GIB, 0.001


@dataclass
class Run:
    """A pace with ops at every ``gap`` ns; free memory and what is held (bytes) are functions of the time (ns)."""

    cost: float  # of a question
    look: float  # of a look at what is held
    gap: float
    free: Callable[[float], float]
    held: Callable[[float], float] = lambda _: 0.0
    pace: Pace = field(default_factory=lambda: Pace(BUDGET))
    now: float = 0.0
    spent: float = 0.0
    questions: int = 0

    def op(self) -> bool:
        """The next one before which the guard does anything; whether it acts."""
        self.now += self.gap * max(1, math.ceil((self.pace.due - self.now) / self.gap))
        if self.now < self.pace.question:
            self.pace.glance(self.now, self.look, int(self.held(self.now)))
            self._pay(self.look)
        if self.now < self.pace.question:
            return False
        free = self.free(self.now)
        self.pace.learn(self.now, self.cost, int(free), int(self.held(self.now)), LEAST, self.look)
        self.questions += 1
        self._pay(self.cost)
        return free < LEAST or self.pace.too_late

    def _pay(self, cost: float) -> None:
        self.spent += cost
        self.now += cost


@given(
    costs=st.lists(st.floats(1e3, 1e7), min_size=2, max_size=100),
    dear=st.floats(1.0, 1000.0),
    levels=st.lists(st.tuples(st.integers(0, 80), st.integers(0, 80)), min_size=50, max_size=50),
    gap=st.floats(1e2, 1e8),
)
def test_auto_stays_within_its_budget_whatever_memory_does(
    costs: list[float], dear: float, levels: list[tuple[int, int]], gap: float
) -> None:
    """Free memory and what is held jump at every question and look."""
    calls = itertools.count()
    run = Run(0, 0, gap, lambda _: levels[next(calls) % 50][0] * GIB, lambda _: levels[next(calls) % 50][1] * GIB)
    for cost in costs:
        run.cost, run.look = cost, cost / dear
        run.op()
    assert run.spent <= BUDGET * run.now + (OVERDRAFT + 3) * max(costs)


@given(
    cost=st.floats(1e3, 8e6),
    dear=st.sampled_from([1.0, 100.0]),
    periods=st.floats(0.5, 200.0),  # questions that the budget pays for until memory runs out
    growth=st.floats(0.0, 1.9),
    gap=st.floats(1e4, 1e6),
)
def test_auto_sees_what_others_take_before_the_threshold(
    cost: float, dear: float, periods: float, growth: float, gap: float
) -> None:
    """Memory is lost steadily, then ``growth`` times as fast: auto asks within two ops of the threshold or acts sooner."""
    rate = ROOM / (periods * cost / BUDGET)
    turn = 2 * (gap + cost)
    run = Run(cost, cost / dear, gap, lambda t: LEAST + ROOM - rate * (min(t, turn) + growth * max(0, t - turn)))
    # Two questions, of which it learns how fast memory goes: what is lost before nobody knows who does not ask.
    for _ in range(2):
        run.pace.due = run.pace.question = 0
        if run.op():
            return
    slack = 4 * rate * (growth + 1) * max(gap, cost)  # in two ops and a question: nobody can see more of it
    for _ in range(2000):
        if run.op() or run.free(run.now) < LEAST + slack:
            break
    assert run.free(run.now) >= LEAST - slack


@given(flat=st.floats(0.0, 1e11), lasts=st.floats(2.0, 1000.0), dear=st.floats(10.0, 1000.0), gap=st.floats(1e4, 1e6))
def test_auto_sees_what_this_process_takes_before_the_threshold(
    flat: float, lasts: float, dear: float, gap: float
) -> None:
    """A dear question, nothing for a while, then all room is taken within so many looks: none of it is a surprise."""
    cost = 8e6
    interval = max(cost / dear / (SHARE * BUDGET), gap)
    rate = ROOM / (lasts * interval)

    def taken(t: float) -> float:
        return rate * max(0.0, t - flat)

    run = Run(cost, cost / dear, gap, lambda t: LEAST + ROOM - taken(t), taken)
    slack = 4 * rate * max(gap, cost)
    for _ in range(3_000):
        if run.op() or run.free(run.now) < LEAST + slack:
            break
    assert run.free(run.now) >= LEAST - slack


@pytest.mark.parametrize("dear", [1.0, 160.0])
@pytest.mark.parametrize("whose", ["ours", "others'"])
@pytest.mark.parametrize(("cost", "period"), [(1e4, 8e9), (8e6, 8e9), (8e6, 0.3e9)])
def test_memory_that_comes_and_goes_with_every_step_is_no_shortage(
    cost: float, period: float, whose: str, dear: float
) -> None:
    """20 of 40 GiB taken at once, for half of every step: no false alarm, and the budget is kept."""

    def taken(t: float) -> float:
        return 20.0 * GIB * (t % period > period / 2)

    run = Run(cost, cost / dear, 1e6, lambda t: 40 * GIB - taken(t), taken if whose == "ours" else lambda _: 0.0)
    while run.now < 80e9 and run.questions < 2_000:
        assert not run.op(), f"acted at {run.now / 1e9:.2f} s"
    assert run.spent <= BUDGET * run.now + OVERDRAFT * cost
