"""Group advantages from rewards, computed in the driver (table GROUP_ADVANTAGES), and their lookup by name. Torch-free.

A group advantage takes the rewards of one group at a time, as groups may have different sizes. Errors in user code name
the config key and the line. Axis: G = trained episodes of a group.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from slime_like.algo_interfaces import GroupAdvantage
from slime_like.config.schema.names import GROUP_ADVANTAGES
from slime_like.errors import UserCodeError
from slime_like.registry import is_user_code, resolve
from slime_like.types import F32
from slime_like.util.user_code import name_user_errors

EPSILON = 1e-6  # keeps nearly equal rewards from being scaled up to unit variance


def grpo(rewards_G: F32) -> F32:
    """Return [G]: ``(reward - mean) / (std + EPSILON)`` with mean and standard deviation of the group.

    The standard deviation is that of a sample (divisor G - 1), as in slime and TRL. All advantages are 0 if all rewards are
    equal or there is one episode.
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

    The advantage equals ``G / (G - 1)`` times (reward minus the group's mean). It is 0 if the group has one episode.
    Source: Ahmadian et al. 2024, Back to Basics, arXiv:2402.14740, section 3.2 (from Kool et al. 2019).
    """
    num_episodes = len(rewards_G)
    if num_episodes < 2 or np.ptp(rewards_G) == 0:
        return np.zeros_like(rewards_G, dtype=np.float32)
    exact_G = rewards_G.astype(np.float64)
    baseline_G = (exact_G.sum() - exact_G) / (num_episodes - 1)
    return (exact_G - baseline_G).astype(np.float32)


GROUP = "algo.group_advantage"


def bind_group_advantage(name: str) -> GroupAdvantage:
    """Return the group advantage ``name``, a table entry or an import path.

    Raises ``ConfigError`` if ``name`` is neither, or if it cannot be imported.
    """
    advantage: GroupAdvantage = resolve(GROUP, name, GROUP_ADVANTAGES)
    return UserGroupAdvantage(name, advantage) if is_user_code(name, GROUP_ADVANTAGES) else advantage


@dataclass(frozen=True, slots=True)
class UserGroupAdvantage:
    """Group advantage of a user: an import path, or a table entry that leads to one. Errors in it are raised as ``UserCodeError``."""

    name: str
    advantage: Callable[[F32], Any]

    def __call__(self, rewards_G: F32) -> F32:
        """Return the advantages.

        Raises ``UserCodeError`` if the function raises or does not return one finite number per reward.
        """
        subject = f"a group with rewards {rewards_G.tolist()}"
        with name_user_errors(GROUP, self.name, subject):
            advantages_G = np.asarray(self.advantage(rewards_G), dtype=np.float32)
        if advantages_G.shape != rewards_G.shape or not np.isfinite(advantages_G).all():
            raise UserCodeError(
                f"{GROUP}={self.name} returned {advantages_G.tolist()!s:.200} for {subject}: return one finite number per reward"
            )
        return advantages_G
