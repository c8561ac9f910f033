"""Arithmetic expansions of bash, ``$((...))``, over integers and variables."""

from __future__ import annotations

import ast
import operator
import re
from collections.abc import Callable


def _quotient(a: int, b: int) -> int:
    """Return ``a / b`` truncated toward zero, exactly."""
    quotient = abs(a) // abs(b)
    return quotient if (a < 0) == (b < 0) else -quotient


_OPERATORS: dict[type[ast.operator], Callable[[int, int], int]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: _quotient,
    ast.Mod: lambda a, b: a - b * _quotient(a, b),
}


def plain(text: str) -> str:
    """Return the expression with ``$X`` and ``${X}`` written as ``X``.

    A positional parameter such as ``$1`` stays as it is, and ``evaluate`` does not support it.
    """
    return re.sub(r"\$\{?([A-Za-z_]\w*)\}?", r"\1", text).strip()


def variables(expression: str) -> list[str]:
    """Return the names of the variables in an expression that ``plain`` returned."""
    return re.findall(r"\b[A-Za-z_]\w*", expression)


def evaluate(expression: str, value_of: Callable[[str], str]) -> int | None:
    """Return the value of an expression that ``plain`` returned; None if it is invalid, divides by 0 or is not supported.

    ``value_of`` returns the text of a variable; an empty text counts as 0.
    """
    if "#" in expression:  # a base in bash, as in 8#17, but a comment for ast.parse
        return None
    try:
        return _number(ast.parse(expression, mode="eval").body, value_of)
    except (SyntaxError, ValueError, ZeroDivisionError, RecursionError):
        return None


def _number(node: ast.expr, value_of: Callable[[str], str]) -> int:
    match node:
        case ast.Constant(value=int(value)):
            return value
        case ast.Name(id=name):
            return int(value_of(name) or "0", base=0)  # base 0 rejects 010, which is octal in bash
        case ast.BinOp(left=left, op=op, right=right) if type(op) in _OPERATORS:
            return int(_OPERATORS[type(op)](_number(left, value_of), _number(right, value_of)))
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            return -_number(operand, value_of)
        case _:
            raise ValueError(node)
