"""Extraction of the last ``\\boxed{}`` of a text."""

from __future__ import annotations

import re
from dataclasses import replace

from slime_like.types import Sample

OPENING = re.compile(r"\\(?:boxed|fbox)\s*\{")
BRACE = re.compile(r"\\[\\{}]|[{}]")  # an escaped brace is text


def last_boxed(text: str) -> str | None:
    """Return the content of the last ``\\boxed{}`` or ``\\fbox{}``; None without one, or if it does not close.

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
    """Return the sample with the content of its last box as text; empty without a box."""
    return replace(sample, text=last_boxed(sample.text) or "")
