"""Reward ``dapo``: the answer follows ``Answer:`` in the last ``TAIL`` characters of a response; correct is +1, wrong is -1.

Source of the rule: DAPO, Yu et al. 2025, arXiv:2503.14476, as implemented by slime's rm_type ``dapo``: the score is slime's
``--reward-key score``, the accuracy its ``--eval-reward-key acc``.
"""

from __future__ import annotations

import re

from slime_like.reward.kinds import label_of, needs_label
from slime_like.reward.latex import OPENING, equal, label_latex, last_boxed
from slime_like.types import Prompt, Reward, Sample

TAIL = 300  # characters; answers of MATH-500 have at most 159
ANSWER = re.compile(r"answer[ \t]*:([^\n]*)", re.IGNORECASE)
SPECIAL = re.compile(r"<\|[^|<>]*\|>")  # special tokens of a chat template, if the tokenizer keeps them


@needs_label
def dapo(prompt: Prompt, sample: Sample) -> Reward:
    """Return score and accuracy 1 if the text after the last ``Answer:`` has the value of the label, else -1 and 0.

    Only the last ``TAIL`` characters of the response count. Raises ``ValueError`` if the prompt has no label.
    """
    label = label_of(prompt)
    answers = ANSWER.findall(sample.text[-TAIL:])
    correct = bool(answers) and _matches(label, answers[-1])
    return Reward(score=1.0 if correct else -1.0, accuracy=float(correct))


def _matches(label: str, text: str) -> bool:
    text = SPECIAL.sub("", text).strip().strip("*").strip()
    if OPENING.search(text):
        text = last_boxed(text) or ""
    return equal(label_latex(label), label_latex(text.rpartition("=")[2]))
