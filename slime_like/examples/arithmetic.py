"""A calculator that reads text from a model: a grammar of its own, bounded in every direction, nothing evaluated as code.

sum     = product (("+" | "-") product)*
product = factor (("*" | "/") factor)*
factor  = ("+" | "-") factor | "(" sum ")" | number
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from fractions import Fraction

MOST_CHARACTERS = 200
MOST_DEPTH = 20
LARGEST = 10**30  # of any value on the way: numbers, and fractions above and below the line

_TOKEN = re.compile(r"\s*(?:(?P<number>\d+(?:\.\d+)?|\.\d+)|(?P<sign>[-+*/()]))")


def calculate(text: str) -> str:
    """What ``text`` comes to, as text. Raises ``ValueError`` saying what is wrong with it.

    Example: ``calculate("12+34*2") == "80"``, ``calculate("1/8") == "0.125"``, ``calculate("1/3") == "0.333333333333"``.
    """
    if len(text) > MOST_CHARACTERS:
        raise ValueError(f"{len(text)} characters, at most {MOST_CHARACTERS}")
    parser = _ExpressionParser(list(_tokens(text)))
    value = parser.sum(0)
    if parser.next:
        raise ValueError(f"unexpected {parser.next}")
    return str(value.numerator) if value.denominator == 1 else f"{float(value):.12g}"


def _tokens(text: str) -> Iterator[str]:
    text, at = text.rstrip(), 0
    while at < len(text):
        found = _TOKEN.match(text, at)
        if found is None or not text.isascii():
            raise ValueError(f"no number or sign at {text[at:].lstrip()[:10]!r}")
        yield found["number"] or found["sign"]
        at = found.end()


class _ExpressionParser:
    """Recursive descent over tokens, at most ``MOST_DEPTH`` deep."""

    def __init__(self, tokens: list[str]) -> None:
        self._tokens = tokens[::-1]

    @property
    def next(self) -> str:
        """The token to come; empty at the end."""
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
        if depth > MOST_DEPTH:
            raise ValueError(f"more than {MOST_DEPTH} deep")
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
    if max(abs(value.numerator), value.denominator) > LARGEST:
        raise ValueError("a number is too large")
    return value
