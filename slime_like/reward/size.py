"""Upper bound on the size of a formula after sympy has evaluated and expanded it.

The bound is computed without evaluating the formula, because a few characters can denote numbers that exhaust memory:
``((9^{99})^{99})^{99}``, ``\\binom{999!}{500!}``, ``(a+b+c+d+e+f)^{99}``. LaTeX is parsed as sums of products of
powers; letters are assumed to be small numbers.
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
MAX_SIZE = 1e18  # cap of digits and terms, treated as infinite
ROOT_DIGITS = 40  # digits of a radicand: sympy factors it
ARGUMENT_DIGITS = 6  # digits of an exponent, and of the argument of an exponential or trigonometric function
FUNCTIONS = {rf"\{name}" for name in ("exp", "sinh", "cosh", "tanh", "coth", "sin", "cos", "tan", "cot", "sec", "csc")}
FACTORIAL_DIGITS = 3  # digits of the number before ``!`` or in a binomial coefficient


@dataclass(frozen=True, slots=True)
class Size:
    """Upper bounds on a value's number of decimal digits and on its number of terms after expansion."""

    digits: float = 0.0
    terms: float = 1.0
    is_number: bool = False  # numeric: collapses into one term

    def times(self, other: Size) -> Size:
        """Return the bound on the product or quotient with ``other``."""
        return Size(
            min(MAX_SIZE, self.digits + other.digits),
            min(MAX_SIZE, self.terms * other.terms),
            self.is_number and other.is_number,
        )

    def plus(self, other: Size) -> Size:
        """Return the bound on the sum or difference with ``other``."""
        are_numbers = self.is_number and other.is_number
        terms = 1.0 if are_numbers else min(MAX_SIZE, self.terms + other.terms)
        return Size(max(self.digits, other.digits) + 0.31, terms, are_numbers)

    def power(self, exponent: Size) -> Size:
        """Return the bound on this value raised to ``exponent``."""
        if exponent.digits > ARGUMENT_DIGITS:
            return HUGE
        n = math.ceil(10.0**exponent.digits)
        digits = min(MAX_SIZE, max(self.digits, 0.31 * self.is_number) * n)
        return Size(digits, _expanded(self.terms, n), self.is_number and exponent.is_number).with_part(exponent)

    def with_part(self, other: Size) -> Size:
        """Return the bound on this value if ``other`` is computed as a part of it, such as an exponent or index."""
        return Size(self.digits, max(self.terms, other.terms), self.is_number)


ONE, HUGE = Size(), Size(MAX_SIZE, MAX_SIZE)


def _expanded(terms: float, n: int) -> float:
    """Return a bound on the number of terms after a sum of ``terms`` terms is raised to ``n`` and expanded.

    Products of the same terms in another order count once.
    """
    if terms <= 1:
        return 1.0
    if terms > 1000 or n > 10**6:
        return MAX_SIZE
    return min(MAX_SIZE, float(math.comb(n + int(terms) - 1, int(terms) - 1)))


def size_of(latex: str) -> Size:
    """Return an upper bound on the size of a formula; ``HUGE`` if it is nested too deeply to be read."""
    try:
        return _FormulaReader([token for token in TOKEN.findall(latex) if token not in SKIPPED]).read()
    except RecursionError:
        return HUGE


class _FormulaReader:
    """Parser that computes the ``Size`` of a formula from its tokens."""

    def __init__(self, tokens: list[str]) -> None:
        self._tokens, self._at = tokens, 0

    def _peek(self) -> str:
        return self._tokens[self._at] if self._at < len(self._tokens) else ""

    def _next(self) -> str:
        self._at += 1
        return self._tokens[self._at - 1]

    def read(self) -> Size:
        """Return the bound on the whole formula.

        An unmatched closing bracket is skipped, and the text after it counts as a factor.
        """
        size = self._sum()
        while self._peek():
            self._next()
            size = size.times(self._sum())
        return size

    def _sum(self) -> Size:
        """Read a sum up to a closing bracket or the end; return its bound, ``ONE`` if it is empty.

        The parts of an equation or list count as terms.
        """
        total: Size | None = None
        while (token := self._peek()) and token not in CLOSING:
            if token in BETWEEN or token in ("+", "-", r"\pm", r"\mp"):
                self._next()
                continue
            product = self._product()
            total = product if total is None else total.plus(product)
        return total or ONE

    def _product(self) -> Size:
        size = self._factor()
        ends = {*CLOSING, *BETWEEN, "+", "-", r"\pm", r"\mp", ""}
        while self._peek() not in ends:
            size = size.times(self._factor())
        return size

    def _factor(self) -> Size:
        """Read an atom with its powers, subscripts and factorials; return the bound."""
        size = self._atom()
        while (token := self._peek()) in ("^", "_", "!"):
            self._next()
            if token == "!":
                size = _factorial(size)
            elif token == "_":
                size = size.with_part(self._argument())
            else:
                size = size.power(self._argument())
        return size

    def _argument(self) -> Size:
        """Read an argument of ``^``, ``_`` or a function, including its powers, subscripts and factorials; return its bound.

        So ``9^9^9``, which is invalid LaTeX, is read as a power tower. The bound is ``ONE`` if there is no argument.
        """
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
            size = self._sum()
            if self._peek():
                self._next()
            return size
        if token[0].isdecimal() or token[0] == ".":
            integer = token.partition(".")[0].lstrip("0")
            leading = float(integer[:15] or "1") or 1.0  # zeros of another script, which lstrip leaves, give 0
            return Size(math.log10(leading) + max(0, len(integer) - 15), 1.0, is_number=True)
        return ONE

    def _braced(self) -> Size:
        """Read the argument of a command, either a group or the next token; return its bound, ``ONE`` if there is none."""
        return self._atom() if self._peek() and self._peek() not in CLOSING else ONE

    def _function(self) -> Size:
        exponents: list[Size] = []
        while self._peek() == "^":  # power of the function value
            self._next()
            exponents.append(self._argument())
        argument = self._argument()
        size = HUGE if argument.digits > ARGUMENT_DIGITS else Size(argument.digits, argument.terms)
        for exponent in exponents:
            size = size.power(exponent)
        return size

    def _root(self) -> Size:
        index = self._atom() if self._peek() == "[" else ONE
        size = self._braced().with_part(index)
        return HUGE if size.digits > ROOT_DIGITS else Size(size.digits, size.terms)


def _factorial(size: Size) -> Size:
    """Return the bound on a factorial."""
    if size.digits > FACTORIAL_DIGITS:
        return HUGE
    n = 10.0**size.digits
    return Size(n * max(size.digits, 0.31), size.terms if size.is_number else _product(size, n), size.is_number)


def _binomial(top: Size, bottom: Size) -> Size:
    """Return the bound on a binomial coefficient."""
    product = Size(max(top.digits, bottom.digits), top.terms * bottom.terms, top.is_number and bottom.is_number)
    digits = _factorial(top).digits + _factorial(bottom).digits
    return HUGE if digits >= MAX_SIZE else Size(digits, _factorial(product).terms, product.is_number)


def _product(size: Size, n: float) -> float:
    """Return a bound on the number of terms that sympy creates when it expands a factorial or binomial coefficient.

    Example: ``(m + n)!`` with a symbol ``m``. Sympy multiplies out ``n`` factors one by one.
    """
    return min(MAX_SIZE, max(size.terms, n * n))
