"""Reward ``answer``: 1 if the final answer of a response, boxed or not, is mathematically equal to the label."""

from __future__ import annotations

import re

from slime_like.reward.kinds import label_of, needs_label
from slime_like.reward.latex import OPENING, equal, label_latex, last_boxed
from slime_like.types import Prompt, Reward, Sample

TAIL = 2000  # characters at the end of a response without a box that are searched for an answer
INLINE = re.compile(r"\$\$(.+?)\$\$|\$([^$\n]+)\$|\\\((.+?)\\\)|\\\[(.+?)\\\]", re.DOTALL)
UNSIGNED = r"(?:(?:\d{1,3}(?:,\d{3})+|\d+)(?:\.\d+)?|\.\d+)"
NUMBER = re.compile(rf"(?<![\w.])[-+]?{UNSIGNED}(?:\s*/\s*{UNSIGNED})?%?(?!\w)")


@needs_label
def answer(prompt: Prompt, sample: Sample) -> Reward:
    """Return score and accuracy 1 if the final answer equals the label, else 0.

    Raises ``ValueError`` if the prompt has no label.
    """
    label, response_answer = label_of(prompt), final_answer(sample.text)
    correct = response_answer is not None and equal(label_latex(label), response_answer)
    return Reward(score=float(correct), accuracy=float(correct))


def final_answer(text: str) -> str | None:
    """Return LaTeX of the final answer: the content of the last ``\\boxed{}``, else the last formula or number.

    The result is None if the last box is empty or does not close. Without a box, only the last ``TAIL`` characters count; the
    result is None if they have neither formula nor number, or if the last of these is an empty formula.
    Example: ``final_answer("so $x=3$, in all 12.") == "12"``.
    """
    if OPENING.search(text):
        return (last_boxed(text) or "").strip() or None
    text = text[-TAIL:]
    formulas = list(INLINE.finditer(text))
    start = formulas[-1].end() if formulas else 0
    numbers = NUMBER.findall(text, start)
    if numbers:
        return numbers[-1]
    if formulas:
        return next(part for part in formulas[-1].groups() if part is not None).strip() or None
    return None
