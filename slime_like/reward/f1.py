"""Reward ``f1``: word overlap between response and label, for free-text answers.

Source: the F1 of SQuAD, Rajpurkar et al. 2016, arXiv:1606.05250, with HotpotQA's rule for yes and no (Yang et al. 2018,
arXiv:1809.09600), as implemented by slime's rm_type ``f1``.
"""

from __future__ import annotations

import re
import string
from collections import Counter
from collections.abc import Mapping
from typing import Any

from slime_like.reward.kinds import checks_rows, label_of, needs_label
from slime_like.types import Prompt, Reward, Sample

ARTICLES = re.compile(r"\b(?:a|an|the)\b")
NO_PUNCTUATION = str.maketrans("", "", string.punctuation)
EXACT_ONLY = {"yes", "no", "noanswer"}  # answers that must match completely


def words(text: str) -> list[str]:
    """Return the words in lower case, without ASCII punctuation and English articles."""
    return ARTICLES.sub(" ", text.lower().translate(NO_PUNCTUATION)).split()


def _scorable(label: str | None, metadata: Mapping[str, Any]) -> str:
    del metadata
    if label is not None and not words(label):
        return f"label {label!r} has no words, so f1 would score every answer 0; add words to the label"
    return ""


@needs_label
@checks_rows(_scorable)
def f1(prompt: Prompt, sample: Sample) -> Reward:
    """Return the harmonic mean of precision and recall over the words of response and label (0 to 1), and no accuracy.

    If the only word of either text is in ``EXACT_ONLY``, the score is 0 unless it is the only word of both. Raises
    ``ValueError`` if the prompt has no label.
    """
    expected, actual = words(label_of(prompt)), words(sample.text)
    for text in (" ".join(expected), " ".join(actual)):
        if text in EXACT_ONLY and expected != actual:
            return Reward(0.0)
    common = (Counter(expected) & Counter(actual)).total()
    return Reward(2.0 * common / (len(expected) + len(actual)) if common else 0.0)
