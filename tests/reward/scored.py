"""Sample groups with texts, for rewards."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from slime_like.types import Prompt, Sample, SampleGroup, Source, Span, Status


def group(
    *texts: str, label: str | None = "4", rm_type: str | None = None, metadata: Mapping[str, Any] | None = None
) -> SampleGroup:
    """Return a group with one sample per text."""
    prompt = Prompt(7, np.zeros(1, dtype=np.int32), "2+2=", label, rm_type, dict(metadata or {}))
    return SampleGroup(0, prompt, tuple(_sample(i, text) for i, text in enumerate(texts)))


def _sample(sample_id: int, text: str) -> Sample:
    return Sample(
        group_id=0,
        episode_id=sample_id,
        sample_id=sample_id,
        seed=0,
        token_ids=np.zeros(2, dtype=np.int32),
        logprobs=np.zeros(2, dtype=np.float32),
        spans=(Span(0, 1, Source.PROMPT), Span(1, 2, Source.MODEL, 0)),
        status=Status.COMPLETED,
        text=text,
    )


def scores(scored_group: SampleGroup) -> list[float]:
    """Return the score of each scored sample."""
    return [s.reward.score for s in scored_group.samples if s.reward is not None]
