"""Whether two LaTeX strings mean the same value: math-verify, kept from what could run for ever or run as code.

math-verify (Hugging Face) parses LaTeX into sympy by a grammar and compares by value. Kept out are

- its parser for plain expressions, which goes through sympy's ``parse_expr`` and so through Python's ``eval`` on text
  that a model wrote: only LaTeX is handed over;
- its own time limits, which are signal handlers: the reward pool enforces the deadline by ending the process;
- expressions that take sympy minutes or gigabytes, such as ``9^{9^{9}}`` and integrals: these are compared as text.
"""

from __future__ import annotations

import importlib
import logging
import re
from functools import lru_cache
from typing import Any

from slime_like.reward.boxed import last_boxed
from slime_like.reward.size import size_of

INTEGER = re.compile(r"[-+]?\d{1,18}")
DOLLARS = re.compile(r"\$\$(.+)\$\$|\$([^$\n]+)\$|\\\((.+)\\\)|\\\[(.+)\\\]", re.DOTALL)
PERCENT = re.compile(r"\\?%$")
LONGEST = 400  # characters; answers of MATH-500 have at most 159
DEEPEST = 12  # nested braces
MOST_DIGITS, MOST_TERMS = 20_000, 1_000  # of what sympy computes, and multiplies out
WILD = re.compile(
    r"\d{60,}"  # numbers without end
    r"|\^\s*\{[^{}]*\^|\^\s*[\w.]+\s*\^"  # powers of powers
    r"|\^\s*\{?\s*[-+]?[\d\s,]{5,}"  # large exponents
    r"|[)\]}]\s*\^\s*\{?\s*\d{3,}"  # large powers of a formula
    r"|\d{4,}\s*\}*\s*!|!\s*!"  # large and repeated factorials
    r"|\\(?:sum|prod)(?![a-zA-Z]).*\d{3,}"
    r"|\\(?:sum|prod)(?![a-zA-Z])(?!\s*_\s*\{[^{}]*\}\s*\^\s*(?:\w|\{\s*[-+\w\s]{1,9}\}))"  # limits that are not whole
    r"|\\[dt]?binom\s*\{?\s*\d{4,}"
    r"|\\(?:int|oint|iint|iiint|lim)(?![a-zA-Z])\s*(?:_(?:\w|\{[^{}]*\}))?+(?:\^(?:\w|\{[^{}]*\}))?+(?=.*\^|.*\\[a-z])"
    r"|\\(?:sum|prod)(?![a-zA-Z]).*\\infty|\\infty.*\\(?:sum|prod)(?![a-zA-Z])"
    r"|\\(?:sum|prod|det|log|ln)(?![a-zA-Z]).*\\(?:sum|prod)(?![a-zA-Z])",
    re.DOTALL,
)
LOOKS = re.compile(r"\\(?:left|right|displaystyle)(?![a-zA-Z])|\\[!,;:]|\\?\$|\^\s*\{?\s*\\circ\s*\}?|°|\.\s*$")
WRAPPED = re.compile(r"\\(?:text|textbf|mathrm|mathbf|mbox)\s*\{([^{}]*)\}")
SPACE = re.compile(r"(?<!\d) | (?!\d)")  # "1 2" is not "12"


def equal(label: str, answer: str) -> bool:
    """Whether label and answer have the same value. Text that is not maths is compared as text, whatever its case."""
    label, answer = label.strip(), answer.strip()
    if not plain(label) or not plain(answer):
        return False
    if plain(label) == plain(answer):
        return True
    if INTEGER.fullmatch(label) and INTEGER.fullmatch(answer):
        return int(label) == int(answer)  # what most wrong answers are: no need for sympy
    if not (tame(label) and tame(answer)):
        return False
    # A fault boundary: what a model wrote goes through a grammar and sympy, and nothing it writes may end the run.
    try:
        verify: Any = _math_verify().verify
        gold, found = _parse(label), _parse(answer)
        return bool(gold and found and verify(gold, found, timeout_seconds=None))
    except Exception:  # noqa: BLE001
        return False


def tame(latex: str) -> bool:
    """Whether sympy can be trusted with an expression: not long, deep, or of a size that only a formula can name."""
    depth = deepest = 0
    for character in latex[:LONGEST]:
        depth += (character in "{([") - (character in "})]")
        deepest = max(deepest, depth)
    if len(latex) > LONGEST or deepest > DEEPEST or WILD.search(latex):
        return False
    size = size_of(latex)
    return size.digits <= MOST_DIGITS and size.terms <= MOST_TERMS


def plain(latex: str) -> str:
    """What is left of LaTeX without what changes only its looks, for comparison as text."""
    text = latex.replace("\\dfrac", "\\frac").replace("\\tfrac", "\\frac").replace("{,}", ",")
    return SPACE.sub("", " ".join(LOOKS.sub("", WRAPPED.sub(r"\1", text)).split())).lower()


def label_latex(label: str) -> str:
    """LaTeX of a label: all of it, without the box or the dollars it may stand in."""
    boxed = last_boxed(label)
    if boxed is not None:
        return boxed
    formula = DOLLARS.fullmatch(label.strip())
    return label if formula is None else next(part for part in formula.groups() if part is not None)


def _parse(latex: str) -> list[Any]:
    module = _math_verify()
    latex = latex.rstrip(".").replace("°", "").strip()
    percent = PERCENT.search(latex)  # math-verify knows a percentage by the sign behind the formula
    formula = f"${latex[: percent.start()]}$%" if percent else f"${latex}$"
    config = module.LatexExtractionConfig(boxed_match_priority=0)
    found: list[Any] = module.parse(formula, [config], fallback_mode="no_fallback", parsing_timeout=None)
    return found


@lru_cache(maxsize=1)
def _math_verify() -> Any:
    """math-verify, imported on first use: it brings sympy, which plain string equality does not need."""
    # It warns that its time limits are off, and of every text it cannot parse: on purpose, and of no interest.
    for name in ("math_verify", "latex2sympy2_extended"):
        logging.getLogger(name).setLevel(logging.CRITICAL)
    return importlib.import_module("math_verify")
