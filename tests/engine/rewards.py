"""A reward that a worker imports in no time."""

from __future__ import annotations

from slime_like.types import Prompt, Sample


def even(prompt: Prompt, sample: Sample) -> float:
    """1 for an even number of sampled tokens."""
    return float(sample.num_response_tokens % 2 == 0)
