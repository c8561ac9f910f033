"""The benchmark's reward: which share of the 64 sampled tokens are digits."""

from __future__ import annotations

from benchmarks.inputs import NEW_TOKENS
from slime_like.types import Prompt, Sample


def digits(prompt: Prompt, sample: Sample) -> float:
    """Return a reward in [0, 1]."""
    del prompt
    return min(1.0, sum(character.isdigit() for character in sample.text) / NEW_TOKENS)
