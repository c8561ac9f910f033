"""Scored groups without an engine."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from slime_like.types import Reward, SampleGroup
from tests.reward import scored


def group(scores: Sequence[float], *, label: str | None = None) -> SampleGroup:
    """Return a group of prompt 7 with one short sample per score."""
    unscored = scored.group(*(f"answer {index}" for index in range(len(scores))), label=label)
    samples = [replace(sample, reward=Reward(score)) for sample, score in zip(unscored.samples, scores, strict=True)]
    return replace(unscored, samples=tuple(samples))
