"""Functions whose return statements ``test_returned`` reads."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any


def keeps_all(group: Any) -> None:
    """Return nothing."""


def names_a_reason(group: Any) -> str:
    """Return text."""
    return "long"


def reason_or_none(group: Any) -> str | None:
    """Return text or None."""
    if group is None:
        return None
    return "long" if len(group) > 1 else None


def calls_another(group: Any) -> Any:
    """Return what another function returns."""
    return keeps_all(group) or group.reason


def of_a_nested_function(group: Any) -> None:
    """Return nothing, but contain a function that returns a truth value."""

    def is_long() -> bool:
        return True

    is_long()


def truth(group: Any) -> Any:
    """Return True."""
    return True


def comparison(group: Any) -> Any:
    """Return a comparison."""
    return group.size > group.limit


def two_comparisons(group: Any) -> Any:
    """Return a conjunction of comparisons."""
    return group.size > 1 and group.size < 3


def negation(group: Any) -> Any:
    """Return a negation."""
    return not group


def one_branch(group: Any) -> Any:
    """Return a reason or False."""
    return "long" if group else False  # the line of one_branch


def predicate(group: Any) -> Any:
    """Return the result of any."""
    return any(group)


def empty_reason(group: Any) -> Any:
    """Return a reason without a letter."""
    return ""


class CallableFilter:
    """Object that returns True."""

    def __call__(self, group: Any) -> Any:
        return True


def nothing() -> None:
    """Have no return statement."""
    len("")


def none_twice(group: Any) -> None:
    """Return None in two ways."""
    if group:
        return None
    return


def raises() -> None:
    """Raise an error."""
    raise NotImplementedError


def something(group: Any) -> Any:
    """Return a value in one of two branches."""
    if group:
        return group
    return None


@functools.cache
def decorated() -> None:
    """Have a decorator, which may return something else."""


def as_filter(predicate: Callable[[Any], bool]) -> Callable[[Any], str | None]:
    """Return a filter that has the name and, for ``inspect``, the source of a predicate."""

    @functools.wraps(predicate)
    def reason(group: Any) -> str | None:
        return "short" if predicate(group) else None

    return reason


def is_short(group: Any) -> bool:
    """Return a truth value."""
    return len(group) < 5


wrapping = as_filter(is_short)


def generator() -> Iterator[int]:
    """Return a generator."""
    yield 1


of_lambda = lambda group: True  # noqa: E731
