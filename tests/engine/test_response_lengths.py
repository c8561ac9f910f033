"""Estimate of response lengths, against sums over single tokens and simulated engines."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from slime_like_plugins.kv_capacity.lengths import DEVIATIONS, NUM_ENDLESS, ResponseLengths

observations = st.lists(st.tuples(st.integers(0, 60), st.booleans()), max_size=40)


def estimate(pairs: list[tuple[int, bool]]) -> ResponseLengths:
    return ResponseLengths.estimate(
        np.array([length for length, _ in pairs], np.int64),
        np.array([is_complete for _, is_complete in pairs], np.bool_),
    )


def share_longer(pairs: list[tuple[int, bool]], tokens: int) -> float:
    """Return the product-limit estimate by its definition, with NUM_ENDLESS more responses that never end."""
    share = 1.0
    for length in sorted({length for length, is_complete in pairs if is_complete and length <= tokens}):
        at_risk = NUM_ENDLESS + sum(num_tokens >= length for num_tokens, _ in pairs)
        share *= 1 - sum(is_complete and num_tokens == length for num_tokens, is_complete in pairs) / at_risk
    return share


@given(observations, st.lists(st.tuples(st.integers(0, 80), st.integers(0, 80)), min_size=1, max_size=20))
def test_a_reservation_bounds_every_future_step_and_is_at_most_what_can_be_sampled(
    pairs: list[tuple[int, bool]], requests: list[tuple[int, int]]
) -> None:
    requests = [(generated, generated + more) for generated, more in requests]
    reserved_tokens = estimate(pairs).reservation(*np.array(requests, np.int64).T)
    assert reserved_tokens <= sum(maximum - generated for generated, maximum in requests)
    for step in range(1, 81):
        alive = [  # (share that is alive, tokens it holds)
            (share_longer(pairs, generated + step - 1) / share_longer(pairs, generated), generated + step)
            for generated, maximum in requests
            if generated + step <= maximum
        ]
        mean = sum(share * length for share, length in alive)
        deviation = math.sqrt(sum(share * (1 - share) * length**2 for share, length in alive))
        lower_bound = min(mean + DEVIATIONS * deviation, sum(length for _, length in alive))
        assert reserved_tokens >= lower_bound - sum(generated for generated, _ in requests) - 1e-6


def test_without_observations_responses_reach_their_maximum() -> None:
    assert estimate([]).reservation(np.array([0, 30]), np.array([100, 130])) == 200
    reserved_tokens = estimate([]).reservation(np.array([0, 30]), np.array([100, 100]))
    assert 140 <= reserved_tokens <= 145, "when the second ends, the first has 70 tokens"


def test_short_responses_that_end_first_do_not_hide_the_long_ones_that_run() -> None:
    complete_responses, requests = [(10, True)] * 80, (np.zeros(64, np.int64), np.full(64, 1000))
    few_endless, with_endless = estimate(complete_responses), estimate(complete_responses + [(500, False)] * 240)
    assert few_endless.reservation(*requests) < 20_000 < 45_000 < with_endless.reservation(*requests)


@dataclass
class SimulatedEngine:
    """Pool of ``capacity`` tokens that decodes a token of each running response per step."""

    capacity: int
    maximum: int
    running: list[list[int]] = field(default_factory=list[list[int]])  # [generated, length]
    responses: list[tuple[int, bool]] = field(default_factory=list[tuple[int, bool]])
    num_retractions: int = 0
    num_steps: int = 0

    def admits(self, reserve: bool) -> bool:
        if not self.running:
            return True
        used_tokens = sum(generated for generated, _ in self.running)
        if not reserve:  # SGLang's estimate
            ratio = max(0.098, 0.7 - 0.001 * self.num_steps)
            return used_tokens + ratio * sum(self.maximum - g for g, _ in self.running) + self.maximum <= self.capacity
        generated = np.array([*(g for g, _ in self.running), 0])
        lengths = estimate([*self.responses[-512:], *((g, False) for g, _ in self.running)])
        return used_tokens + lengths.reservation(generated, np.full(len(generated), self.maximum)) <= self.capacity

    def run(self, lengths: list[int], *, reserve: bool) -> None:
        waiting = list(reversed(lengths))
        while waiting or self.running:
            while waiting and self.admits(reserve):
                self.running.append([0, waiting.pop()])
            while sum(g + 1 for g, _ in self.running) > self.capacity:
                waiting.append(self.running.pop()[1])
                self.num_retractions += 1
            for response in self.running:
                response[0] += 1
            self.responses += [(g, g < self.maximum) for g, length in self.running if g >= length]
            self.running = [response for response in self.running if response[0] < response[1]]
            self.num_steps += 1


@pytest.mark.parametrize("shape", ["constant", "geometric", "bimodal", "long"])
def test_reservations_avoid_retractions_in_about_as_many_steps(shape: str) -> None:
    rng = np.random.default_rng(0)
    maximum, num_requests = 400, 500
    lengths = {
        "constant": np.full(num_requests, 120),
        "geometric": np.minimum(maximum, rng.geometric(1 / 80, num_requests)),
        "bimodal": np.where(rng.random(num_requests) < 0.15, maximum, 20),
        "long": rng.integers(300, maximum + 1, num_requests),
    }[shape]
    guessing, reserving = (SimulatedEngine(6000, maximum) for _ in range(2))
    guessing.run(lengths.tolist(), reserve=False)
    reserving.run(lengths.tolist(), reserve=True)
    assert reserving.num_retractions <= num_requests / 200
    assert reserving.num_steps <= 1.1 * guessing.num_steps
