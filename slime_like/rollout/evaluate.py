"""What a held-out set says of the model, from its scored groups."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from slime_like.metrics.types import Last, Metric
from slime_like.rollout.pass_at_k import mean_pass_at_k
from slime_like.types import Reward, Sample, SampleGroup, Status


def eval_metrics(name: str, groups: Sequence[SampleGroup]) -> tuple[Metric, ...]:
    """``eval/<name>``: mean accuracy (mean score where the reward knows no right answer), and what qualifies it.

    Names are slime's. A sample is right where its accuracy, or else its score, is 1.
    """
    episodes = [_episodes(group) for group in groups]
    samples = [sample for group in episodes for sample in group]
    if not samples:
        return ()
    lengths = np.array([sample.num_response_tokens for sample in samples], dtype=np.float64)
    per_group = [[_accuracy(sample.reward) for sample in group] for group in episodes]
    values: dict[str, float] = {
        "": float(np.mean(np.concatenate(per_group))),
        "-truncated_ratio": float(np.mean([sample.status is Status.TRUNCATED for sample in samples])),
        "/response_len/mean": float(lengths.mean()),
        "/response_len/median": float(np.median(lengths)),
        "/response_len/max": float(lengths.max()),
        "/response_len/min": float(lengths.min()),
    }
    right = [[accuracy == 1.0 for accuracy in accuracies] for accuracies in per_group]
    values |= {f"-pass@{k}": value for k, value in mean_pass_at_k(right).items()}
    return tuple(Last(f"eval/{name}{suffix}", value) for suffix, value in values.items())


def _episodes(group: SampleGroup) -> list[Sample]:
    """The first sample of each episode: one that gave several counts once."""
    found: dict[int, Sample] = {}
    for sample in group.samples:
        found.setdefault(sample.episode_id, sample)
    return list(found.values())


def _accuracy(reward: Reward | None) -> float:
    assert reward is not None, "groups are scored before they are evaluated"
    return reward.score if reward.accuracy is None else reward.accuracy
