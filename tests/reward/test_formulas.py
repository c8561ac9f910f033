"""Formulas: every one is scored or refused within a bounded amount of work, for any nesting."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterator

import pytest
from hypothesis import Phase, given, settings

from slime_like.reward.latex import is_safe
from tests.reward.call_counter import MAX_CALLS
from tests.reward.formulas import FORMULAS

NUM_FORMULAS = 40


@pytest.fixture(scope="module")
def calls() -> Iterator[Callable[[str], int]]:
    """Return a function that counts the calls a formula takes, in a process with kernel limits."""
    command, pipe = [sys.executable, "-m", "tests.reward.call_counter"], subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True) as process:
        assert process.stdin is not None and process.stdout is not None
        stdin, stdout = process.stdin, process.stdout

        def count(formula: str) -> int:
            stdin.write(f"{json.dumps(formula)}\n")
            stdin.flush()
            answer = stdout.readline()
            assert answer, f"{formula}: the process ended of memory or CPU time"
            return int(answer)

        yield count
        process.stdin.close()


@settings(max_examples=NUM_FORMULAS, derandomize=True, phases=[Phase.generate])  # shrinking may take long
@given(FORMULAS)
def test_a_formula_takes_a_bounded_number_of_calls(calls: Callable[[str], int], formula: str) -> None:
    assert calls(formula) <= MAX_CALLS


@pytest.mark.parametrize(
    "formula",
    [
        r"\binom{99}{n}",
        r"\log(\binom{99}{n})",
        r"\binom{n}{99}",
        r"\binom{n+60}{k}",
        r"(n+99)!",
        r"\left\lfloor \sum_{k=0}^{\frac{1}{3}} 3 \right\rfloor",
        r"\prod_{k=1}^{0.5} k",
        r"\theta^{\binom{100}{i}}",
        r"\sinh((2)^{99})",
        r"e^{\binom{99}{50}}",
        r"\sin^{{9}^{{9}^{9}}}(1)",
    ],
)
def test_unexpectedly_expensive_formulas_are_compared_as_text(calls: Callable[[str], int], formula: str) -> None:
    assert not is_safe(formula)
    assert calls(formula) < 10_000, "compared by size and text, without sympy"


@pytest.mark.parametrize(
    "formula",
    [
        r"\binom{n+9}{9}",
        r"\binom{2n}{n}",
        r"\binom{20}{k}",
        r"\binom{99}{50}",
        "(n+1)!",
        r"\sum_{k=1}^{n} k",
        r"\sin^{2} x",
        r"2\cos(\frac{\pi}{12})",
        "e^{-2}",
    ],
)
def test_formulas_of_few_factors_are_computed(formula: str) -> None:
    assert is_safe(formula)
