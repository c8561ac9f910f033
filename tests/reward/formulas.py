"""Strategy of nested formulas that a model could write, covering the grammar of math-verify."""

from __future__ import annotations

from hypothesis import strategies as st

NUMBERS = ["0", "1", "2", "3", "7", "12", "31", "99", "100", "0.5", "999", "9999", "123456789"]
LETTERS = ["x", "y", "n", "k", r"\pi", "e", "i", r"\theta"]
FUNCTIONS = ["sin", "cos", "tan", "arcsin", "log", "ln", "exp", "sinh"]
LEAVES = st.sampled_from(NUMBERS) | st.sampled_from(LETTERS)


def _larger(inner: st.SearchStrategy[str]) -> st.SearchStrategy[str]:
    """Return formulas with ``inner`` as parts."""
    short_formulas = st.sampled_from(["1", "2", "3", "5", "12", "99", "n", "-1", r"\frac{1}{2}", r"\frac{1}{3}"])

    def of(form: str, *parts: st.SearchStrategy[str]) -> st.SearchStrategy[str]:
        return st.tuples(*parts).map(lambda values: form % values)

    return st.one_of(
        of("%s%s%s", inner, st.sampled_from(["+", "-", r"\cdot ", r"\times ", "", "=", ","]), inner),
        of("(%s)^{%s}", inner, short_formulas | inner),
        of("%s^{%s}", LEAVES, short_formulas | inner),
        of(r"\frac{%s}{%s}", inner, inner),
        of(r"\binom{%s}{%s}", inner, inner),
        of("(%s)!", inner),
        of("%s!", LEAVES),
        of(r"\sqrt{%s}", inner),
        of(r"\sqrt[%s]{%s}", st.sampled_from(["3", "5", "12", "99"]), inner),
        of(r"\%s(%s)", st.sampled_from(FUNCTIONS), inner),
        of(r"\log_{%s}(%s)", LEAVES, inner),
        of(r"\sum_{%s=%s}^{%s} %s", st.sampled_from(["n", "k"]), st.sampled_from(["0", "1"]), short_formulas, inner),
        of(r"\prod_{%s=1}^{%s} %s", st.sampled_from(["n", "k"]), short_formulas, inner),
        of(r"\int_{%s}^{%s} %s dx", st.sampled_from(["0", "-1"]), short_formulas, inner),
        of(r"\int %s dx", inner),
        of(r"\lim_{x \to %s} %s", st.sampled_from(["0", r"\infty"]), inner),
        of(r"|%s|", inner),
        of(r"\left\lfloor %s \right\rfloor", inner),
        of(r"\begin{pmatrix} %s & %s \\ %s & 1 \end{pmatrix}", inner, inner, inner),
        of(r"\{%s, %s\}", inner, inner),
        of(r"[%s, %s)", inner, inner),
    )


FORMULAS = st.recursive(LEAVES, _larger, max_leaves=8)
