"""Held-out prompts through the same generate and reward path as training, under their own sampling."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from slime_like.metrics.types import Last, Metric
from slime_like.types import Reward, SampleGroup, Status


def eval_metrics(name: str, groups: Sequence[SampleGroup]) -> tuple[Metric, ...]:
    """``eval/<name>``: mean accuracy (mean score where the reward knows no right answer), and what qualifies it."""
    samples = [sample for group in groups for sample in group.samples]
    lengths = np.array([sample.num_response_tokens for sample in samples], dtype=np.float64)
    per_group = [np.array([_correct(sample.reward) for sample in group.samples]) for group in groups]
    values: dict[str, float] = {
        "": float(np.mean(np.concatenate(per_group))),
        "-truncated_ratio": float(np.mean([sample.status is Status.TRUNCATED for sample in samples])),
        "-response_len/mean": float(lengths.mean()),
    }
    if any(len(correct) > 1 for correct in per_group):
        values["-pass@k"] = float(np.mean([correct.max() for correct in per_group]))
    return tuple(Last(f"eval/{name}{suffix}", value) for suffix, value in values.items())


def _correct(reward: Reward | None) -> float:
    assert reward is not None, "groups are scored before they are evaluated"
    return reward.score if reward.accuracy is None else reward.accuracy
