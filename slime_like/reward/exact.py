"""Reward ``exact``: 1 if the response equals the label, apart from outer whitespace."""

from __future__ import annotations

from slime_like.reward.kinds import label_of, needs_label
from slime_like.types import Prompt, Reward, Sample


@needs_label
def exact(prompt: Prompt, sample: Sample) -> Reward:
    """Return score and accuracy 1 if response and label are equal, apart from outer whitespace, else 0.

    Raises ``ValueError`` if the prompt has no label.
    """
    correct = sample.text.strip() == label_of(prompt).strip()
    return Reward(score=float(correct), accuracy=float(correct))
