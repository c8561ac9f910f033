"""A bound on the size that a formula has once sympy has computed and expanded it, found without computing it.

A few characters name numbers that fill a machine: ``((9^{99})^{99})^{99}``, ``\\binom{999!}{500!}``, ``(a+b+c+d+e+f)^{99}``.
The bound reads LaTeX loosely, as sums of products of powers, and takes letters for small.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass

TOKEN = re.compile(r"\\[a-zA-Z]+|\\.|\d+(?:\.\d+)?|\.\d+|\S", re.DOTALL)
OPENING, CLOSING = "{([", "})]"
SKIPPED = {r"\left", r"\right", r"\big", r"\Big", r"\displaystyle", r"\,", r"\!", r"\;", r"\:", r"\ ", r"\limits", "$"}
BETWEEN = {"=", ",", ";", "<", ">", "&", r"\\", r"\le", r"\ge", r"\leq", r"\geq", r"\ne", r"\neq", r"\in", "|"}
FRACTIONS = {r"\frac", r"\dfrac", r"\tfrac"}
BINOMIALS = {r"\binom", r"\dbinom", r"\tbinom"}
MOST = 1e18  # of both figures: more is as good as infinite
ROOT_DIGITS = 40  # below a root or a fractional power: sympy factors what is there
ARGUMENT_DIGITS = 6  # of an exponent, and of what stands in a function that grows or turns with it
FUNCTIONS = {rf"\{name}" for name in ("exp", "sinh", "cosh", "tanh", "coth", "sin", "cos", "tan", "cot", "sec", "csc")}
FACTORIAL_DIGITS = 3  # of the number before ``!`` or in a binomial coefficient


@dataclass(frozen=True, slots=True)
class Size:
    """Bounds on a value: its decimal digits, and its terms once everything is multiplied out."""

    digits: float = 0.0
    terms: float = 1.0
    is_number: bool = False  # made of digits only: its terms become one

    def times(self, other: Size) -> Size:
        """Return the bound on a product or quotient."""
        return Size(
            min(MOST, self.digits + other.digits),
            min(MOST, self.terms * other.terms),
            self.is_number and other.is_number,
        )

    def plus(self, other: Size) -> Size:
        """Return the bound on a sum or difference."""
        both = self.is_number and other.is_number
        terms = 1.0 if both else min(MOST, self.terms + other.terms)
        return Size(max(self.digits, other.digits) + 0.31, terms, both)

    def power(self, exponent: Size) -> Size:
        """Return the bound on a power."""
        if exponent.digits > ARGUMENT_DIGITS:
            return HUGE
        n = math.ceil(10.0**exponent.digits)
        digits = min(MOST, max(self.digits, 0.31 * self.is_number) * n)
        return Size(digits, _expanded(self.terms, n), self.is_number and exponent.is_number).beside(exponent)

    def beside(self, other: Size) -> Size:
        """Return the bound on this value where ``other`` is computed as a part of it, as its exponent or index."""
        return Size(self.digits, max(self.terms, other.terms), self.is_number)


ONE, HUGE = Size(), Size(MOST, MOST)


def _expanded(terms: float, n: int) -> float:
    """Return how many terms the ``n``-th power of a sum has: multisets of ``n`` out of ``terms``."""
    if terms <= 1:
        return 1.0
    if terms > 1000 or n > 10**6:
        return MOST
    return min(MOST, float(math.comb(n + int(terms) - 1, int(terms) - 1)))


def size_of(latex: str) -> Size:
    """Return the bound on a formula; ``HUGE`` where it is nested too deep to be read."""
    try:
        return _FormulaReader([token for token in TOKEN.findall(latex) if token not in SKIPPED]).read()
    except RecursionError:
        return HUGE


class _FormulaReader:
    """Reads tokens from left to right."""

    def __init__(self, tokens: list[str]) -> None:
        self._tokens, self._at = tokens, 0

    def _peek(self) -> str:
        return self._tokens[self._at] if self._at < len(self._tokens) else ""

    def _next(self) -> str:
        self._at += 1
        return self._tokens[self._at - 1]

    def read(self) -> Size:
        """Return the bound on all of it, closing brackets without an opening one included."""
        found = self._sum()
        while self._peek():
            self._next()
            found = found.times(self._sum())
        return found

    def _sum(self) -> Size:
        """Read up to a closing bracket."""
        total: Size | None = None
        while (token := self._peek()) and token not in CLOSING:
            if token in BETWEEN or token in ("+", "-", r"\pm", r"\mp"):
                self._next()
                continue
            product = self._product()
            total = product if total is None else total.plus(product)
        return total or ONE

    def _product(self) -> Size:
        found = self._factor()
        ends = {*CLOSING, *BETWEEN, "+", "-", r"\pm", r"\mp", ""}
        while self._peek() not in ends:
            found = found.times(self._factor())
        return found

    def _factor(self) -> Size:
        """Read an atom with what follows it: powers, subscripts, factorials."""
        found = self._atom()
        while (token := self._peek()) in ("^", "_", "!"):
            self._next()
            if token == "!":
                found = _factorial(found)
            elif token == "_":
                found = found.beside(self._argument())
            else:
                found = found.power(self._argument())
        return found

    def _argument(self) -> Size:
        """What ``^`` applies, with its own powers: ``9^9^9`` is no LaTeX, and read as what it looks like."""
        if self._peek() == "-":
            self._next()
        return self._factor() if self._peek() and self._peek() not in CLOSING else ONE

    def _atom(self) -> Size:
        token = self._next()
        if token in FRACTIONS:
            return self._braced().times(self._braced())
        if token in BINOMIALS:
            return _binomial(self._braced(), self._braced())
        if token == r"\sqrt":
            return self._root()
        if token in FUNCTIONS:
            return self._function()
        if token in OPENING:
            found = self._sum()
            if self._peek():
                self._next()
            return found
        if token[0].isdecimal() or token[0] == ".":
            whole = token.partition(".")[0].lstrip("0")
            return Size(math.log10(float(whole[:15] or "1")) + max(0, len(whole) - 15), 1.0, is_number=True)
        return ONE

    def _braced(self) -> Size:
        """An argument of a command: a group, or the next token."""
        return self._atom() if self._peek() and self._peek() not in CLOSING else ONE

    def _function(self) -> Size:
        while self._peek() == "^":  # of the value
            self._next()
            self._argument()
        found = self._argument()
        return HUGE if found.digits > ARGUMENT_DIGITS else Size(found.digits, found.terms)

    def _root(self) -> Size:
        index = self._atom() if self._peek() == "[" else ONE
        found = self._braced().beside(index)
        return HUGE if found.digits > ROOT_DIGITS else Size(found.digits, found.terms)


def _factorial(found: Size) -> Size:
    """Return the bound on a factorial."""
    if found.digits > FACTORIAL_DIGITS:
        return HUGE
    n = 10.0**found.digits
    return Size(n * max(found.digits, 0.31), found.terms if found.is_number else _product(found, n), found.is_number)


def _binomial(top: Size, bottom: Size) -> Size:
    """Return the bound on a binomial coefficient."""
    both = Size(max(top.digits, bottom.digits), top.terms * bottom.terms, top.is_number and bottom.is_number)
    digits = _factorial(top).digits + _factorial(bottom).digits
    return HUGE if digits >= MOST else Size(digits, _factorial(both).terms, both.is_number)


def _product(found: Size, n: float) -> float:
    """Return how many terms sympy makes of ``(m + n)!`` and ``\\binom{n}{m}`` with a letter m: ``n`` factors, multiplied out
    one after another.
    """
    return min(MOST, max(found.terms, n * n))
