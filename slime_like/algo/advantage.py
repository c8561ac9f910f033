"""Group advantages from rewards, computed in the driver (table GROUP_ADVANTAGES). numpy only.

A function takes the rewards of one group at a time, as groups may have different sizes. Axis: G = trained episodes of a
group.
"""

from __future__ import annotations

import numpy as np

from slime_like.types import F32

EPSILON = 1e-6  # keeps nearly equal rewards from being scaled up to unit variance


def grpo(rewards_G: F32) -> F32:
    """Return [G]: reward minus the group's mean, divided by the standard deviation (unbiased, as in slime and TRL).

    All advantages are 0 if all rewards are equal or there is one episode.
    Source: Shao et al. 2024, DeepSeekMath, arXiv:2402.03300, section 4.1.2.
    """
    if len(rewards_G) < 2 or np.ptp(rewards_G) == 0:
        return np.zeros_like(rewards_G, dtype=np.float32)
    exact_G = rewards_G.astype(np.float64)
    return ((exact_G - exact_G.mean()) / (exact_G.std(ddof=1) + EPSILON)).astype(np.float32)


def dr_grpo(rewards_G: F32) -> F32:
    """Return [G]: reward minus the group's mean. Dividing by the deviation would favour prompts that are too easy or too hard.

    Source: Liu et al. 2025, Understanding R1-Zero-Like Training, arXiv:2503.20783, section 3.
    """
    if len(rewards_G) < 2 or np.ptp(rewards_G) == 0:
        return np.zeros_like(rewards_G, dtype=np.float32)
    exact_G = rewards_G.astype(np.float64)
    return (exact_G - exact_G.mean()).astype(np.float32)


def rloo(rewards_G: F32) -> F32:
    """Return [G]: reward minus the mean reward of the other episodes, a baseline independent of the episode.

    Equal to ``G / (G - 1)`` times the reward minus the group's mean.
    Source: Ahmadian et al. 2024, Back to Basics, arXiv:2402.14740, section 3.2 (from Kool et al. 2019).
    """
    num_episodes = len(rewards_G)
    if num_episodes < 2 or np.ptp(rewards_G) == 0:
        return np.zeros_like(rewards_G, dtype=np.float32)
    exact_G = rewards_G.astype(np.float64)
    baseline_G = (exact_G.sum() - exact_G) / (num_episodes - 1)
    return (exact_G - baseline_G).astype(np.float32)
