"""Reward ``deepscaler``: ``math`` for reasoning models, applied to the text after the thinking part.

Source of the rule: DeepScaleR (Luo et al. 2025), as implemented by slime's rm_type ``deepscaler``.
"""

from __future__ import annotations

from slime_like.reward.kinds import label_of, needs_label
from slime_like.reward.math import boxed_is
from slime_like.types import Prompt, Reward, Sample

THOUGHT, RESPONSE = "</think>", "###Response"


@needs_label
def deepscaler(prompt: Prompt, sample: Sample) -> Reward:
    """Return score and accuracy 1 if the boxed answer after ``</think>`` (or ``###Response``) equals the label, else 0.

    The text after the last ``</think>`` counts. Without that marker, the text after the first ``###Response`` counts, up to
    the second if there is one. A response that contains neither marker has no answer. Raises ``ValueError`` if the prompt
    has no label.
    """
    label, text = label_of(prompt), sample.text
    if THOUGHT in text:
        return boxed_is(label, text.rpartition(THOUGHT)[2])
    if RESPONSE in text:
        return boxed_is(label, text.split(RESPONSE, 2)[1])
    return Reward(score=0.0, accuracy=0.0)
