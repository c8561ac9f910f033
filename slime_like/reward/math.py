"""Reward ``math``: is what stands in the last ``\\boxed{}`` mathematically equal to the label?

As slime's ``math``: without a box there is no answer. ``answer`` is for prompts that ask for none.
"""

from __future__ import annotations

from slime_like.reward.boxed import last_boxed
from slime_like.reward.kinds import needs_label
from slime_like.reward.labels import label_of
from slime_like.reward.latex import equal, label_latex
from slime_like.types import Prompt, Reward, Sample


@needs_label
def math(prompt: Prompt, sample: Sample) -> Reward:
    """Score and accuracy 1 where the boxed answer equals the label, else 0. Raises ``ValueError`` without a label."""
    return boxed_is(label_of(prompt), sample.text)


def boxed_is(label: str, text: str) -> Reward:
    """Score and accuracy 1 where the last box of ``text`` holds the label's value, else 0."""
    answer = last_boxed(text)
    correct = answer is not None and equal(label_latex(label), answer)
    return Reward(score=float(correct), accuracy=float(correct))
