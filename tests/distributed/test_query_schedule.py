"""Schedule of ``auto`` memory queries, for simulated memory curves and query costs."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slime_like.distributed.guard.query_schedule import CHEAP_CHECK_SHARE, MAX_OVERDRAFT, QuerySchedule

GIB = 2**30
THRESHOLD, HEADROOM, BUDGET = 3 * GIB, 70.0 * GIB, 0.001


@dataclass
class Simulation:
    """Simulation of a schedule with an op every ``gap`` ns; free and held bytes are functions of the time in ns."""

    cost: float  # time of a query of free memory, in ns
    check_cost: float  # time of a cheap check, in ns
    gap: float
    free: Callable[[float], float]
    process_bytes: Callable[[float], float] = lambda _: 0.0
    schedule: QuerySchedule = field(default_factory=lambda: QuerySchedule(BUDGET))
    now: float = 0.0
    total_cost: float = 0.0
    num_queries: int = 0

    def op(self) -> bool:
        """Advance to the next op before which the guard runs. Return True if the guard acts."""
        self.now += self.gap * max(1, math.ceil((self.schedule.next_reading_at - self.now) / self.gap))
        if self.now < self.schedule.next_query_at:
            self.schedule.record_cheap_check(self.now, self.check_cost, int(self.process_bytes(self.now)))
            self._spend(self.check_cost)
        if self.now < self.schedule.next_query_at:
            return False
        free = self.free(self.now)
        self.schedule.record_query(
            self.now, self.cost, int(free), int(self.process_bytes(self.now)), THRESHOLD, self.check_cost
        )
        self.num_queries += 1
        self._spend(self.cost)
        return free < THRESHOLD or self.schedule.too_late

    def _spend(self, cost: float) -> None:
        self.total_cost += cost
        self.now += cost


@given(
    costs=st.lists(st.floats(1e3, 1e7), min_size=2, max_size=100),
    cost_ratio=st.floats(1.0, 1000.0),
    levels=st.lists(st.tuples(st.integers(0, 80), st.integers(0, 80)), min_size=50, max_size=50),
    gap=st.floats(1e2, 1e8),
)
def test_auto_stays_within_its_budget(
    costs: list[float], cost_ratio: float, levels: list[tuple[int, int]], gap: float
) -> None:
    """Free and held memory jump at every query and cheap check."""
    calls = itertools.count()
    simulation = Simulation(
        0, 0, gap, lambda _: levels[next(calls) % 50][0] * GIB, lambda _: levels[next(calls) % 50][1] * GIB
    )
    for cost in costs:
        simulation.cost, simulation.check_cost = cost, cost / cost_ratio
        simulation.op()
    assert simulation.total_cost <= BUDGET * simulation.now + (MAX_OVERDRAFT + 3) * max(costs)


@given(
    cost=st.floats(1e3, 8e6),
    cost_ratio=st.sampled_from([1.0, 100.0]),
    periods=st.floats(0.5, 200.0),  # number of queries within the budget until memory runs out
    growth=st.floats(0.0, 1.9),
    gap=st.floats(1e4, 1e6),
)
def test_auto_notices_memory_taken_by_others_before_the_threshold(
    cost: float, cost_ratio: float, periods: float, growth: float, gap: float
) -> None:
    """Memory shrinks, later ``growth`` times as fast: auto queries within two ops of the threshold, or acts sooner."""
    rate = HEADROOM / (periods * cost / BUDGET)
    turn = 2 * (gap + cost)
    simulation = Simulation(
        cost, cost / cost_ratio, gap, lambda t: THRESHOLD + HEADROOM - rate * (min(t, turn) + growth * max(0, t - turn))
    )
    # Two queries show how fast memory shrinks; a loss before them cannot be known.
    for _ in range(2):
        simulation.schedule.next_reading_at = simulation.schedule.next_query_at = 0
        if simulation.op():
            return
    slack = 4 * rate * (growth + 1) * max(gap, cost)  # lost during two ops and a query, which no query can notice
    for _ in range(2000):
        if simulation.op() or simulation.free(simulation.now) < THRESHOLD + slack:
            break
    assert simulation.free(simulation.now) >= THRESHOLD - slack


@given(
    flat=st.floats(0.0, 1e11),
    num_checks=st.floats(2.0, 1000.0),
    cost_ratio=st.floats(10.0, 1000.0),
    gap=st.floats(1e4, 1e6),
)
def test_auto_notices_memory_taken_by_this_process_before_the_threshold(
    flat: float, num_checks: float, cost_ratio: float, gap: float
) -> None:
    """Expensive queries, constant memory for a while, then all headroom is taken within ``num_checks`` cheap checks."""
    cost = 8e6
    interval = max(cost / cost_ratio / (CHEAP_CHECK_SHARE * BUDGET), gap)
    rate = HEADROOM / (num_checks * interval)

    def taken_bytes(t: float) -> float:
        return rate * max(0.0, t - flat)

    simulation = Simulation(cost, cost / cost_ratio, gap, lambda t: THRESHOLD + HEADROOM - taken_bytes(t), taken_bytes)
    slack = 4 * rate * max(gap, cost)
    for _ in range(3_000):
        if simulation.op() or simulation.free(simulation.now) < THRESHOLD + slack:
            break
    assert simulation.free(simulation.now) >= THRESHOLD - slack


@pytest.mark.parametrize("cost_ratio", [1.0, 160.0])
@pytest.mark.parametrize("owner", ["self", "others"])
@pytest.mark.parametrize(("cost", "period"), [(1e4, 8e9), (8e6, 8e9), (8e6, 0.3e9)])
def test_memory_that_oscillates_with_every_step_is_not_a_shortage(
    cost: float, period: float, owner: str, cost_ratio: float
) -> None:
    """20 of 40 GiB are taken for half of every step: no false alarm, and the budget is kept."""

    def taken_bytes(t: float) -> float:
        return 20.0 * GIB * (t % period > period / 2)

    simulation = Simulation(
        cost,
        cost / cost_ratio,
        1e6,
        lambda t: 40 * GIB - taken_bytes(t),
        taken_bytes if owner == "self" else lambda _: 0.0,
    )
    while simulation.now < 80e9 and simulation.num_queries < 2_000:
        assert not simulation.op(), f"acted at {simulation.now / 1e9:.2f} s"
    assert simulation.total_cost <= BUDGET * simulation.now + MAX_OVERDRAFT * cost
