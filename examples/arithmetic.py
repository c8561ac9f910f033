"""Calculator for text written by a model. It parses a bounded grammar and evaluates nothing as code.

sum     = product (("+" | "-") product)*
product = factor (("*" | "/") factor)*
factor  = ("+" | "-") factor | "(" sum ")" | number
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from fractions import Fraction

MAX_CHARACTERS = 200
MAX_DEPTH = 20
MAX_VALUE = 10**30  # limit of intermediate numerators and denominators

_TOKEN = re.compile(r"\s*(?:(?P<number>\d+(?:\.\d+)?|\.\d+)|(?P<sign>[-+*/()]))")


def calculate(text: str) -> str:
    """Return the value of the expression ``text`` as a string: exact if it is whole, else rounded to 12 significant digits.

    Raises ``ValueError`` naming the problem if ``text`` does not follow this module's grammar, divides by zero or exceeds a
    limit (``MAX_CHARACTERS``, ``MAX_DEPTH``, ``MAX_VALUE``). Examples:
    ``calculate("12+34*2") == "80"``, ``calculate("1/8") == "0.125"``, ``calculate("1/3") == "0.333333333333"``.
    """
    if len(text) > MAX_CHARACTERS:
        raise ValueError(f"{len(text)} characters, at most {MAX_CHARACTERS}")
    parser = _ExpressionParser(list(_tokens(text)))
    value = parser.sum(0)
    if parser.next:
        raise ValueError(f"unexpected {parser.next}")
    return str(value.numerator) if value.denominator == 1 else f"{float(value):.12g}"


def _tokens(text: str) -> Iterator[str]:
    text, at = text.rstrip(), 0
    while at < len(text):
        match = _TOKEN.match(text, at)
        if match is None or not match[0].isascii():
            raise ValueError(f"no number or sign at {text[at:].lstrip()[:10]!r}")
        yield match["number"] or match["sign"]
        at = match.end()


class _ExpressionParser:
    """Recursive descent over tokens, at most ``MAX_DEPTH`` deep."""

    def __init__(self, tokens: list[str]) -> None:
        self._tokens = tokens[::-1]

    @property
    def next(self) -> str:
        """Return the next token without consuming it; empty at the end."""
        return self._tokens[-1] if self._tokens else ""

    def _take(self) -> str:
        if not self._tokens:
            raise ValueError("it ends too early")
        return self._tokens.pop()

    def sum(self, depth: int) -> Fraction:
        value = self.product(depth)
        while self.next in ("+", "-"):
            sign = 1 if self._take() == "+" else -1
            value = _bounded(value + sign * self.product(depth))
        return value

    def product(self, depth: int) -> Fraction:
        value = self.factor(depth)
        while self.next in ("*", "/"):
            if self._take() == "*":
                value = _bounded(value * self.factor(depth))
            elif divisor := self.factor(depth):
                value = _bounded(value / divisor)
            else:
                raise ValueError("division by zero")
        return value

    def factor(self, depth: int) -> Fraction:
        if depth > MAX_DEPTH:
            raise ValueError(f"more than {MAX_DEPTH} deep")
        token = self._take()
        match token:
            case "+" | "-":
                return self.factor(depth + 1) * (1 if token == "+" else -1)
            case "(":
                value = self.sum(depth + 1)
                if self._take() != ")":
                    raise ValueError("a bracket does not close")
                return value
            case "*" | "/" | ")":
                raise ValueError(f"unexpected {token}")
            case number:
                return _bounded(Fraction(number))


def _bounded(value: Fraction) -> Fraction:
    if max(abs(value.numerator), value.denominator) > MAX_VALUE:
        raise ValueError("a number is too large")
    return value
