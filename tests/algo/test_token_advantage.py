"""REINFORCE++: returns and whitening at sizes beyond the invariance tests."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from slime_like.algo.token_advantage import ReinforcePlusPlus, discounted_returns, whiten
from slime_like.config.schema.algo import GrpoConfig
from slime_like.errors import ConfigError
from tests.algo.simulate import LocalReduce
from tests.hypothesis_examples import num_examples


@settings(deadline=None, max_examples=num_examples(40))
@given(lengths=st.lists(st.integers(1, 40), min_size=1, max_size=5), gamma=st.sampled_from([0.0, 0.3, 0.99, 1.0]))
def test_returns_equal_the_backward_recursion(lengths: list[int], gamma: float) -> None:
    segment = torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths))
    rewards = torch.randn(len(segment), dtype=torch.float64, generator=torch.Generator().manual_seed(sum(lengths)))
    expected, future_return = [0.0] * len(rewards), 0.0
    for t in reversed(range(len(rewards))):
        ends = t + 1 == len(rewards) or segment[t] != segment[t + 1]
        future_return = float(rewards[t]) + (0.0 if ends else gamma * future_return)
        expected[t] = future_return
    torch.testing.assert_close(discounted_returns(rewards, segment, gamma), torch.tensor(expected, dtype=torch.float64))


def test_small_gamma_over_a_long_sequence_stays_finite() -> None:
    rewards = torch.zeros(5000)
    rewards[-1] = 1.0
    result = discounted_returns(rewards, torch.zeros(5000, dtype=torch.int64), 0.5)
    assert result.isfinite().all()
    torch.testing.assert_close(result[-4:], torch.tensor([0.125, 0.25, 0.5, 1.0]))


def test_whitening_survives_a_large_offset_and_equal_values() -> None:
    values = torch.tensor([1e4 + 1, 1e4 - 1, 5.0], dtype=torch.float32)
    mask = torch.tensor([True, True, False])
    torch.testing.assert_close(whiten([values], [mask], LocalReduce())[0], torch.tensor([1.0, -1.0, 0.0]))
    whitened = whiten([torch.full((4,), 0.1)], [torch.ones(4, dtype=torch.bool)], LocalReduce())[0]
    torch.testing.assert_close(whitened, torch.zeros(4), atol=1e-3, rtol=0)


def test_a_rank_without_trained_tokens_participates() -> None:
    assert whiten([], [], LocalReduce()) == []
    result = whiten([torch.ones(2)], [torch.zeros(2, dtype=torch.bool)], LocalReduce())
    assert result[0].tolist() == [0.0, 0.0]


def test_a_config_of_another_algorithm_is_refused() -> None:
    with pytest.raises(ConfigError, match="algo=reinforce_pp"):
        ReinforcePlusPlus(GrpoConfig())
