"""Calculator: arithmetic compared with Python's, and arbitrary text."""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from examples.arithmetic import MAX_CHARACTERS, calculate

NUMBERS = st.integers(0, 9999).map(str)
SUMS = st.recursive(
    NUMBERS,
    lambda inner: st.one_of(
        st.tuples(inner, st.sampled_from("+-*"), inner).map("".join),
        inner.map(lambda text: f"({text})"),
        inner.map(lambda text: f"-{text}"),
    ),
    max_leaves=6,
)
OPERATORS: dict[type[ast.operator], Callable[[Fraction, Fraction], Fraction]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
}


def reference(node: ast.expr) -> Fraction:
    """Return the value of a parsed Python expression."""
    match node:
        case ast.Constant(value=int(value)):
            return Fraction(value)
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            return -reference(operand)
        case ast.BinOp(left=left, op=op, right=right):
            return OPERATORS[type(op)](reference(left), reference(right))
        case _:
            raise AssertionError(ast.dump(node))


@given(SUMS)
def test_results_equal_those_of_python(text: str) -> None:
    assert calculate(text) == str(reference(ast.parse(text, mode="eval").body))


@given(st.one_of(st.text(max_size=300), st.text("0123456789+-*/(). ", max_size=300)))
def test_any_text_is_a_number_or_refused(text: str) -> None:
    try:
        float(calculate(text))
    except ValueError as error:
        assert str(error)


@pytest.mark.parametrize(("text", "value"), [("1/8", "0.125"), ("1/3", "0.333333333333"), (" 475 + 006 ", "481")])
def test_fractions_and_leading_zeros(text: str, value: str) -> None:
    assert calculate(text) == value


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "ends too early"),
        ("1/(2-2)", "division by zero"),
        ("9**9", "unexpected"),
        ("1 2", "unexpected 2"),
        ("(1", "ends too early"),
        ("(" * 50 + "1" + ")" * 50, "deep"),
        ("9" * 40, "too large"),
        ("*".join(["99999999"] * 5), "too large"),
        ("1+" * MAX_CHARACTERS + "1", "characters"),
        ("__import__('os')", "no number or sign"),
        ("٣+٤", "no number or sign"),
    ],
)
def test_a_refusal_names_the_reason(text: str, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        calculate(text)
