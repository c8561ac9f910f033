"""Reward ``math``: is the final answer of a response mathematically equal to the label?

math-verify (Hugging Face) parses LaTeX into sympy by a grammar and compares by value. Two things are kept out:

- its parser for plain expressions, which goes through sympy's ``parse_expr`` and so through Python's ``eval`` on text
  that a model wrote: plain numbers are found here and handed over as LaTeX;
- its own time limits, which are signal handlers: the reward pool enforces the deadline by ending the process.
"""

from __future__ import annotations

import importlib
import logging
import re
from functools import lru_cache
from typing import Any

from slime_like.types import Prompt, Reward, Sample

BOXED = re.compile(r"\\(?:boxed|fbox)\s*\{")
INLINE = re.compile(r"\$\$(.+?)\$\$|\$([^$\n]+)\$|\\\((.+?)\\\)|\\\[(.+?)\\\]", re.DOTALL)
UNSIGNED = r"(?:(?:\d{1,3}(?:,\d{3})+|\d+)(?:\.\d+)?|\.\d+)"
NUMBER = re.compile(rf"(?<![\w.])[-+]?{UNSIGNED}(?:\s*/\s*{UNSIGNED})?%?(?!\w)")
INTEGER = re.compile(r"[-+]?\d{1,18}")


def math(prompt: Prompt, sample: Sample) -> Reward:
    """Score and accuracy 1 where the final answer equals the label, else 0. Raises ``ValueError`` without a label."""
    if prompt.label is None:
        raise ValueError(f"prompt {prompt.prompt_id} of {prompt.dataset} has no label")
    answer = final_answer(sample.text)
    correct = answer is not None and equal(_label_latex(prompt.label), answer)
    return Reward(score=float(correct), accuracy=float(correct))


def final_answer(text: str) -> str | None:
    """LaTeX of what ``text`` ends up with: the content of its last ``\\boxed{}``, else its last formula or number.

    Example: ``final_answer("so $x=3$, in all 12.") == "12"``; None when there is neither formula nor number.
    """
    boxed = _last_boxed(text)
    if boxed is not None:
        return boxed.strip() or None
    formulas = list(INLINE.finditer(text))
    start = formulas[-1].end() if formulas else 0
    numbers = NUMBER.findall(text, start)
    if numbers:
        return numbers[-1]
    if formulas:
        return next(part for part in formulas[-1].groups() if part is not None).strip() or None
    return None


def equal(label: str, answer: str) -> bool:
    """Whether two LaTeX strings mean the same value. Text that is not maths is compared as text."""
    label, answer = label.strip(), answer.strip()
    if label == answer:
        return True
    if INTEGER.fullmatch(label) and INTEGER.fullmatch(answer):
        return int(label) == int(answer)  # what most wrong answers are: no need for sympy
    verify: Any = _math_verify().verify
    gold, found = _parse(label), _parse(answer)
    return bool(gold and found and verify(gold, found, timeout_seconds=None))


def _label_latex(label: str) -> str:
    """LaTeX of a label: all of it, without the box or the dollars it may stand in."""
    boxed = _last_boxed(label)
    formula = INLINE.fullmatch(label.strip())
    if boxed is None and formula:
        return next(part for part in formula.groups() if part is not None)
    return label if boxed is None else boxed


def _parse(latex: str) -> list[Any]:
    module = _math_verify()
    percent = re.search(r"\\?%$", latex)  # math-verify knows a percentage by the sign behind the formula
    formula = f"${latex[: percent.start()]}$%" if percent else f"${latex}$"
    config = module.LatexExtractionConfig(boxed_match_priority=0)
    found: list[Any] = module.parse(formula, [config], fallback_mode="no_fallback", parsing_timeout=None)
    return found


@lru_cache(maxsize=1)
def _math_verify() -> Any:
    """math-verify, imported on first use: it brings sympy, which plain string equality does not need."""
    # It warns that its time limits are off: they are, on purpose.
    logging.getLogger("math_verify").setLevel(logging.ERROR)
    return importlib.import_module("math_verify")


def _last_boxed(text: str) -> str | None:
    """Content of the last ``\\boxed{...}`` whose braces close."""
    for match in reversed(list(BOXED.finditer(text))):
        depth = 1
        for i in range(match.end(), len(text)):
            depth += {"{": 1, "}": -1}.get(text[i], 0)
            if depth == 0:
                return text[match.end() : i]
    return None
