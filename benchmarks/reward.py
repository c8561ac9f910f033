"""Reward of the benchmark: the share of digits among the sampled tokens."""

from __future__ import annotations

from benchmarks.inputs import NEW_TOKENS
from slime_like.types import Prompt, Sample


def digits(prompt: Prompt, sample: Sample) -> float:
    """Return the number of digits in the sample's text, divided by ``NEW_TOKENS`` and at most 1."""
    del prompt
    return min(1.0, sum(character.isdigit() for character in sample.text) / NEW_TOKENS)
