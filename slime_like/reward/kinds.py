"""What a reward function says of itself, as marks that the framework reads before a run starts."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

RowCheck = Callable[[str | None, Mapping[str, Any]], str]
"""(label, metadata) -> why a row cannot be scored and what to do; empty when it can."""

LABEL, GROUP, ROW = "needs_label", "scores_groups", "row_check"


def needs_label[F: Callable[..., Any]](function: F) -> F:
    """The reward compares with the label: a row without one is refused when the data is read."""
    return _marked(function, LABEL, True)


def scores_groups[F: Callable[..., Any]](function: F) -> F:
    """The reward takes all samples of a prompt: ``(prompt, samples) -> one Reward or float per sample``, in their order."""
    return _marked(function, GROUP, True)


def checks_rows[F: Callable[..., Any]](check: RowCheck) -> Callable[[F], F]:
    """The reward refuses rows of which ``check`` says why they cannot be scored."""
    return lambda function: _marked(function, ROW, check)


def compares(function: object) -> bool:
    """Whether a row must have a label."""
    return bool(getattr(function, LABEL, False))


def takes_groups(function: object) -> bool:
    """Whether it is called with all samples of a prompt."""
    return bool(getattr(function, GROUP, False))


def row_check(function: object) -> RowCheck | None:
    """What it demands of a row beyond a label."""
    return getattr(function, ROW, None)


def _marked[F: Callable[..., Any]](function: F, mark: str, value: object) -> F:
    setattr(function, mark, value)
    return function
