"""Soft penalty for responses near the length limit, subtracted from rewards before advantages are computed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from slime_like.metrics.types import Mean, Metric
from slime_like.types import UNTRAINED, Sample, SampleGroup


@dataclass(frozen=True, slots=True)
class OverlongPenalty:
    """Length penalty: 0 up to ``max_len - buffer_len`` response tokens, and ``factor`` from ``max_len`` on.

    It grows linearly in between. Filters, dumps and ``rollout/raw_reward`` use the reward before the penalty is
    subtracted.
    Source: DAPO, Yu et al. 2025, arXiv:2503.14476, equation 13.

    Example: ``OverlongPenalty(100, 20, 1.0)`` subtracts 0.5 at 90 tokens and 1 at 100.
    """

    max_len: int  # tokens, rollout.max_response_len
    buffer_len: int  # tokens
    factor: float

    def penalty(self, sample: Sample) -> float:
        """Return the penalty of a sample, at least 0."""
        num_over = sample.num_response_tokens - (self.max_len - self.buffer_len)
        return self.factor * min(max(num_over / self.buffer_len, 0.0), 1.0)

    def penalise(self, groups: Sequence[SampleGroup]) -> list[SampleGroup]:
        """Return the groups with penalised scores. Accuracies are unchanged, as are failed, aborted and unscored samples."""
        return [replace(group, samples=tuple(self._penalise(sample) for sample in group.samples)) for group in groups]

    def metrics(self, groups: Sequence[SampleGroup]) -> list[Metric]:
        """Return ``rollout/overlong_penalty``, the mean penalty of trained samples; [] if there are none."""
        penalties = [self.penalty(s) for group in groups for s in group.samples if s.status not in UNTRAINED]
        return [Mean("rollout/overlong_penalty", float(np.mean(penalties)))] if penalties else []

    def _penalise(self, sample: Sample) -> Sample:
        if sample.reward is None or sample.status in UNTRAINED:
            return sample
        return replace(sample, reward=replace(sample.reward, score=sample.reward.score - self.penalty(sample)))
