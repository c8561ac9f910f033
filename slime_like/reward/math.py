"""Reward ``math``: 1 if the content of the last ``\\boxed{}`` is mathematically equal to the label.

As in slime's ``math``, a response without a box has no answer. Use ``answer`` for prompts that do not request a box.
"""

from __future__ import annotations

from slime_like.reward.kinds import label_of, needs_label
from slime_like.reward.latex import equal, label_latex, last_boxed
from slime_like.types import Prompt, Reward, Sample


@needs_label
def math(prompt: Prompt, sample: Sample) -> Reward:
    """Return score and accuracy 1 if the boxed answer equals the label, else 0.

    Raises ``ValueError`` if the prompt has no label.
    """
    return boxed_is(label_of(prompt), sample.text)


def boxed_is(label: str, text: str) -> Reward:
    """Return score and accuracy 1 if the last box of ``text`` has the label's value, else 0."""
    answer = last_boxed(text)
    correct = answer is not None and equal(label_latex(label), answer)
    return Reward(score=float(correct), accuracy=float(correct))
