"""Decorators that mark reward functions, functions that read the marks, and the label that a reward compares with."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from slime_like.types import Prompt

RowCheck = Callable[[str | None, Mapping[str, Any]], str]
"""Function of (label, metadata) that returns why a row cannot be scored, and the fix; empty if it can."""

LABEL, GROUP, ROW = "needs_label", "scores_groups", "row_check"


def needs_label[F: Callable[..., Any]](function: F) -> F:
    """Mark a reward that compares with the label: rows that have no label are rejected when the data is read."""
    return _mark(function, LABEL, True)


def scores_groups[F: Callable[..., Any]](function: F) -> F:
    """Mark a reward that scores a prompt's samples together.

    It takes ``(prompt, samples)`` and returns a ``Reward`` or float per sample, in order. It does not get samples that failed,
    were aborted or have a reward already.
    """
    return _mark(function, GROUP, True)


def checks_rows[F: Callable[..., Any]](check: RowCheck) -> Callable[[F], F]:
    """Return a decorator that marks a reward: rows for which ``check`` returns a reason are rejected when the data is read."""
    return lambda function: _mark(function, ROW, check)


def compares(function: object) -> bool:
    """Return whether the reward ``function`` is marked by ``needs_label``."""
    return bool(getattr(function, LABEL, False))


def takes_groups(function: object) -> bool:
    """Return whether the reward ``function`` is marked by ``scores_groups``."""
    return bool(getattr(function, GROUP, False))


def row_check(function: object) -> RowCheck | None:
    """Return the check that ``checks_rows`` attached to the reward ``function``; None if there is none."""
    return getattr(function, ROW, None)


def label_of(prompt: Prompt) -> str:
    """Return the prompt's label.

    Raises ``ValueError`` if it has none. The data sources of this project yield no such prompt for a reward marked by
    ``needs_label``; a user's data source may.
    """
    if prompt.label is None:
        raise ValueError(f"prompt {prompt.prompt_id} of {prompt.dataset} has no label")
    return prompt.label


def _mark[F: Callable[..., Any]](function: F, mark: str, value: object) -> F:
    setattr(function, mark, value)
    return function
