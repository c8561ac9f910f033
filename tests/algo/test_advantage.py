"""Group advantages."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from slime_like.algo.advantage import dr_grpo, grpo, rloo
from slime_like.algo_interfaces import GroupAdvantage
from slime_like.config.schema.names import GROUP_ADVANTAGES
from slime_like.registry import resolve

REWARDS = st.lists(st.floats(-5, 5, width=32), min_size=2, max_size=16)


def test_grpo_by_hand() -> None:
    np.testing.assert_allclose(grpo(np.array([0, 1], dtype=np.float32)), [-0.70710578, 0.70710578], rtol=1e-5)


def test_dr_grpo_by_hand() -> None:
    np.testing.assert_allclose(dr_grpo(np.array([0, 1, 1, 2], dtype=np.float32)), [-1, 0, 0, 1])


def test_rloo_by_hand() -> None:
    np.testing.assert_allclose(rloo(np.array([0, 1, 2], dtype=np.float32)), [-1.5, 0, 1.5])


@given(rewards=REWARDS)
def test_rloo_is_the_mean_baseline_rescaled(rewards: list[float]) -> None:
    rewards_G = np.array(rewards, dtype=np.float32)
    expected = dr_grpo(rewards_G) * len(rewards) / (len(rewards) - 1)
    np.testing.assert_allclose(rloo(rewards_G), expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", GROUP_ADVANTAGES)
@pytest.mark.parametrize("rewards", [[0.1] * 7, [1e6] * 3, [3.0], []])
def test_equal_rewards_have_an_advantage_of_zero(name: str, rewards: list[float]) -> None:
    advantage: GroupAdvantage = resolve("algo.group_advantage", name, GROUP_ADVANTAGES)
    advantages = advantage(np.array(rewards, dtype=np.float32))
    assert advantages.dtype == np.float32
    assert advantages.tolist() == [0.0] * len(rewards)


@given(rewards=REWARDS)
def test_grpo_has_mean_0_and_at_most_unit_deviation(rewards: list[float]) -> None:
    advantages = grpo(np.array(rewards, dtype=np.float32)).astype(np.float64)
    assert abs(advantages.mean()) < 1e-4
    assert advantages.std(ddof=1) <= 1 + 1e-4


@given(rewards=REWARDS, shift=st.integers(-3, 3))
def test_an_offset_changes_no_advantage(rewards: list[float], shift: int) -> None:
    rewards_G = (np.round(np.array(rewards) * 8) / 8).astype(np.float32)  # sums stay exact
    np.testing.assert_allclose(dr_grpo((rewards_G + shift).astype(np.float32)), dr_grpo(rewards_G), atol=1e-6)
    np.testing.assert_allclose(grpo((rewards_G + shift).astype(np.float32)), grpo(rewards_G), atol=1e-5)
