"""Values that a function returns, read from its source."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from slime_like.util.returned import may_be_filter_result, returns_of
from tests.core import returning


@pytest.mark.parametrize(
    ("function", "is_filter"),
    [
        (returning.keeps_all, True),
        (returning.names_a_reason, True),
        (returning.reason_or_none, True),
        (returning.calls_another, True),
        (returning.of_a_nested_function, True),
        (returning.truth, False),
        (returning.comparison, False),
        (returning.negation, False),
        (returning.one_branch, False),
        (returning.predicate, False),
        (returning.empty_reason, False),
        (returning.two_comparisons, False),
        (returning.CallableFilter(), False),
    ],
)
def test_a_filter_that_cannot_return_a_reason_is_recognised(function: Callable[..., Any], is_filter: bool) -> None:
    returns = returns_of(function)
    assert returns is not None and returns.file == returning.__file__
    assert all(may_be_filter_result(value) for _, value in returns.statements) is is_filter


def test_the_line_of_a_statement_is_that_of_the_file() -> None:
    returns = returns_of(returning.one_branch)
    assert returns is not None
    ((line, _),) = returns.statements
    with open(returning.__file__) as file:
        assert file.read().splitlines()[line - 1].endswith("# the line of one_branch")


@pytest.mark.parametrize(
    ("function", "always_none"),
    [
        (returning.nothing, True),
        (returning.none_twice, True),
        (returning.of_a_nested_function, True),
        (returning.raises, False),
        (returning.something, False),
    ],
)
def test_a_function_that_always_returns_none_is_recognised(function: Callable[..., Any], always_none: bool) -> None:
    returns = returns_of(function)
    assert returns is not None and returns.always_none is always_none


@pytest.mark.parametrize(
    "function",
    [
        *(returning.decorated, returning.wrapping, returning.generator, returning.of_lambda),
        *(len, returning.CallableFilter),
    ],
)
def test_nothing_is_known_of_a_function_whose_statements_do_not_determine_its_result(
    function: Callable[..., Any],
) -> None:
    assert returns_of(function) is None
