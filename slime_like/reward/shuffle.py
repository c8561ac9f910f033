"""Control experiment ``reward.shuffle``: rewards are permuted over the batch, so that the policy cannot learn from them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from slime_like.types import SampleGroup


def shuffle_rewards(groups: Sequence[SampleGroup], seed: int) -> list[SampleGroup]:
    """Return new groups in which the rewards of all trained samples are permuted across the batch.

    The multiset of rewards is unchanged, so means and histograms look the same. Failed and aborted samples stay as they are.
    """
    rewards = [r for group in groups for sample in group.samples if (r := sample.trained_reward) is not None]
    order = iter(np.random.default_rng(seed).permutation(len(rewards)).tolist())
    return [
        replace(
            group,
            samples=tuple(
                s if s.trained_reward is None else replace(s, reward=rewards[next(order)]) for s in group.samples
            ),
        )
        for group in groups
    ]
