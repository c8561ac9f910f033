"""Reward ``exact``: is the response, spaces at its ends aside, the label?"""

from __future__ import annotations

from slime_like.types import Prompt, Reward, Sample


def exact(prompt: Prompt, sample: Sample) -> Reward:
    """Score and accuracy 1 where the texts are equal, else 0. Raises ``ValueError`` without a label."""
    if prompt.label is None:
        raise ValueError(f"prompt {prompt.prompt_id} of {prompt.dataset} has no label")
    correct = sample.text.strip() == prompt.label.strip()
    return Reward(score=float(correct), accuracy=float(correct))
