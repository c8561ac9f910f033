"""LaTeX answers: the last ``\\boxed{}`` of a text, and equality by value.

math-verify (Hugging Face) parses LaTeX into sympy with a grammar and compares values. It is used here only
where evaluation terminates and runs no code. Excluded are:

- its parser for plain expressions, which uses sympy's ``parse_expr`` and so Python's ``eval`` on text that a model
  wrote: math-verify gets only LaTeX;
- its own time limits, which are signal handlers: the reward pool enforces the deadline by ending the process;
- expressions that may take sympy minutes or gigabytes, such as ``9^{9^{9}}`` and most integrals: these are compared as text.
"""

from __future__ import annotations

import importlib
import logging
import re
from dataclasses import replace
from functools import lru_cache
from typing import Any

from slime_like.reward.size import size_of
from slime_like.types import Sample

OPENING = re.compile(r"\\(?:boxed|fbox)\s*\{")
BRACE = re.compile(r"\\[\\{}]|[{}]")  # an escaped brace is text
INTEGER = re.compile(r"[-+]?\d{1,18}")
DOLLARS = re.compile(r"\$\$(.+)\$\$|\$([^$\n]+)\$|\\\((.+)\\\)|\\\[(.+)\\\]", re.DOTALL)
PERCENT = re.compile(r"\\?%$")
MAX_CHARACTERS = 400  # characters; answers of MATH-500 have at most 159
MAX_DEPTH = 12  # nested braces
MAX_DIGITS, MAX_TERMS = 20_000, 1_000  # digits of results, terms of expanded products in sympy
UNSAFE = re.compile(
    r"\d{60,}"  # very long numbers
    r"|\^\s*\{[^{}]*\^|\^\s*[\w.]+\s*\^"  # powers of powers
    r"|\^\s*\{?\s*[-+]?[\d\s,]{5,}"  # large exponents
    r"|[)\]}]\s*\^\s*\{?\s*\d{3,}"  # large powers of a formula
    r"|\d{4,}\s*\}*\s*!|!\s*!"  # large and repeated factorials
    r"|\\(?:sum|prod)(?![a-zA-Z]).*\d{3,}"
    r"|\\(?:sum|prod)(?![a-zA-Z])(?!\s*_\s*\{[^{}]*\}\s*\^\s*(?:\w|\{\s*[-+\w\s]{1,9}\}))"  # limits that are not integers
    r"|\\[dt]?binom\s*\{?\s*\d{4,}"
    r"|\\(?:int|oint|iint|iiint|lim)(?![a-zA-Z])\s*(?:_(?:\w|\{[^{}]*\}))?+(?:\^(?:\w|\{[^{}]*\}))?+(?=.*\^|.*\\[a-z])"
    r"|\\(?:sum|prod)(?![a-zA-Z]).*\\infty|\\infty.*\\(?:sum|prod)(?![a-zA-Z])"
    r"|\\(?:sum|prod|det|log|ln)(?![a-zA-Z]).*\\(?:sum|prod)(?![a-zA-Z])",
    re.DOTALL,
)
APPEARANCE = re.compile(r"\\(?:left|right|displaystyle)(?![a-zA-Z])|\\[!,;:]|\\?\$|\^\s*\{?\s*\\circ\s*\}?|°|\.\s*$")
WRAPPED = re.compile(r"\\(?:text|textbf|mathrm|mathbf|mbox)\s*\{([^{}]*)\}")
SPACE = re.compile(r"(?<!\d) | (?!\d)")  # "1 2" is not "12"


def last_boxed(text: str) -> str | None:
    """Return the content of the last ``\\boxed{}`` or ``\\fbox{}``; None if there is none, or if it does not close.

    Example: ``last_boxed(r"\\boxed{1}, no: \\boxed{\\frac{1}{2}}") == r"\\frac{1}{2}"``.
    """
    start = -1
    for match in OPENING.finditer(text):
        start = match.end()
    if start < 0:
        return None
    depth = 1
    for match in BRACE.finditer(text, start):
        depth += {"{": 1, "}": -1}.get(match[0], 0)
        if depth == 0:
            return text[start : match.start()]
    return None


def only_boxed(sample: Sample) -> Sample:
    """Return the sample with the content of its last box as text; the text is empty if ``last_boxed`` returns None."""
    return replace(sample, text=last_boxed(sample.text) or "")


def equal(label: str, answer: str) -> bool:
    """Return whether label and answer are equal as text or have the same value; False if ``plain`` of either is empty.

    The comparison of text uses ``plain``, which ignores case and appearance. Values other than integers are compared only if
    sympy can evaluate both safely.
    """
    label, answer = label.strip(), answer.strip()
    if not plain(label) or not plain(answer):
        return False
    if plain(label) == plain(answer):
        return True
    if INTEGER.fullmatch(label) and INTEGER.fullmatch(answer):
        return int(label) == int(answer)  # decides most wrong answers without sympy
    if not (is_safe(label) and is_safe(answer)):
        return False
    # Fault boundary: model output goes through a grammar and sympy, and must not be able to end the run.
    try:
        verify: Any = _math_verify().verify
        gold_values, predictions = _parse(label), _parse(answer)
        return bool(gold_values and predictions and verify(gold_values, predictions, timeout_seconds=None))
    except Exception:  # noqa: BLE001
        return False


def is_safe(latex: str) -> bool:
    """Return whether sympy can evaluate an expression safely.

    Its length, its depth and the size of its result must be within bounds, and no part of it may match ``UNSAFE``.
    """
    depth = max_depth = 0
    for character in latex[:MAX_CHARACTERS]:
        depth += (character in "{([") - (character in "})]")
        max_depth = max(max_depth, depth)
    if len(latex) > MAX_CHARACTERS or max_depth > MAX_DEPTH or UNSAFE.search(latex):
        return False
    size = size_of(latex)
    return size.digits <= MAX_DIGITS and size.terms <= MAX_TERMS


def plain(latex: str) -> str:
    """Return a normalised form of ``latex``, to be compared as text.

    It is in lower case, without most spaces, and without dollar signs, degree signs, a full stop at the end and commands that
    change only the appearance.
    """
    text = latex.replace("\\dfrac", "\\frac").replace("\\tfrac", "\\frac").replace("{,}", ",")
    return SPACE.sub("", " ".join(APPEARANCE.sub("", WRAPPED.sub(r"\1", text)).split())).lower()


def label_latex(label: str) -> str:
    """Return the content of a label's last box or, if it has none, the label without enclosing math delimiters (``$`` etc.)."""
    boxed = last_boxed(label)
    if boxed is not None:
        return boxed
    formula = DOLLARS.fullmatch(label.strip())
    return label if formula is None else next(part for part in formula.groups() if part is not None)


def _parse(latex: str) -> list[Any]:
    module = _math_verify()
    latex = latex.rstrip(".").replace("°", "").strip()
    percent = PERCENT.search(latex)  # math-verify detects a percentage by the sign after the formula
    formula = f"${latex[: percent.start()]}$%" if percent else f"${latex}$"
    config = module.LatexExtractionConfig(boxed_match_priority=0)
    expressions: list[Any] = module.parse(formula, [config], fallback_mode="no_fallback", parsing_timeout=None)
    return expressions


@lru_cache(maxsize=1)
def _math_verify() -> Any:
    """Import math-verify on first use: it imports sympy, which plain string equality does not need."""
    # It warns that its time limits are off, and about every text it cannot parse; both are expected.
    for name in ("math_verify", "latex2sympy2_extended"):
        logging.getLogger(name).setLevel(logging.CRITICAL)
    return importlib.import_module("math_verify")
