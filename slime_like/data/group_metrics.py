"""Metrics ``rollout/*`` of the groups of one rollout."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from slime_like.metrics.types import Last, Max, Mean, Metric
from slime_like.registry import metric_part
from slime_like.types import SampleGroup, Status


def group_metrics(groups: Sequence[SampleGroup], trainer_version: int) -> list[Metric]:
    """Return metrics of rewards, lengths, turns, statuses, staleness and log-probabilities; empty if there are no samples.

    ``trainer_version`` is the version of the trainer's weights before the update.
    """
    samples = [sample for group in groups for sample in group.samples]
    if not samples:
        return []
    rewards = [reward for sample in samples if (reward := sample.trained_reward) is not None]
    accuracies = [reward.accuracy for reward in rewards if reward.accuracy is not None]
    lengths = np.array([sample.num_response_tokens for sample in samples], dtype=np.float64)
    metrics: list[Metric] = [
        Last("rollout/num_samples", len(samples)),
        Last("rollout/response_len/mean", float(lengths.mean())),
        Last("rollout/response_len/median", float(np.median(lengths))),
        Last("rollout/response_len/max", float(lengths.max())),
        Last("rollout/response_len/min", float(lengths.min())),
        Mean("rollout/num_turns", float(np.mean([sample.num_turns for sample in samples]))),
        Mean("rollout/truncated_ratio", float(np.mean([sample.status is Status.TRUNCATED for sample in samples]))),
        Mean("rollout/aborted_ratio", float(np.mean([sample.status is Status.ABORTED for sample in samples]))),
    ]
    generated = any(group.oldest_version >= 0 for group in groups)  # demonstrations have no meaningful reward
    if rewards and generated:
        metrics.append(Mean("rollout/raw_reward", float(np.mean([reward.score for reward in rewards]))))
        metrics.append(
            Mean("rollout/zero_std_ratio", float(np.mean([len(group.trained_scores) < 2 for group in groups])))
        )
    metrics += [
        Mean(f"rollout/reward/{metric_part(name)}", score) for reward in rewards for name, score in reward.parts
    ]
    if accuracies:
        metrics.append(Mean("rollout/accuracy", float(np.mean(accuracies))))
    staleness = [trainer_version - group.oldest_version for group in groups if group.oldest_version >= 0]
    if staleness:
        metrics += [
            Mean("rollout/mixed_version_ratio", float(np.mean([len(set(s.versions)) > 1 for s in samples]))),
            Max("rollout/staleness_max", max(staleness)),
            Mean("rollout/staleness_mean", float(np.mean(staleness))),
        ]
    sampled = np.concatenate([sample.logprobs[~np.isnan(sample.logprobs)] for sample in samples])
    if sampled.size:
        metrics.append(Mean("rollout/log_probs", float(sampled.mean()), weight=float(sampled.size)))
    return metrics
