"""Rewards that compare values: ``math`` requires a box, ``answer`` does not, ``exact`` compares text."""

from __future__ import annotations

import builtins
from pathlib import Path

import pytest

from slime_like.interfaces import RewardFn
from slime_like.reward.answer import answer, final_answer
from slime_like.reward.exact import exact
from slime_like.reward.latex import equal, is_safe
from slime_like.reward.math import math
from slime_like.types import Reward
from tests.reward.scored import group

EQUAL_VALUES = [
    ("4", "2+2=4"),
    ("4", "It is 4."),
    ("4", "answer: 4 apples"),
    ("12", "12.0"),
    ("-3", "x=-3"),
    ("1,234", "1234"),
    ("1/2", r"so \boxed{\frac{1}{2}}"),
    ("0.5", "1/2"),
    ("50%", "0.5"),
    (r"50\%", "in all 50%"),
    ("x^2+1", "$1+x^2$"),
    (r"$\frac{3}{4}$", "0.75"),
    (r"\boxed{7}", "7"),
    ("3", r"we find \(x=3\)"),
    ("2", r"\[ 1+1 \]"),
    ("(1,2)", r"\boxed{(1, 2)}"),
    ("72", r"\boxed{72^\circ}"),
    ("72", r"\boxed{72°}"),
    ("5", r"\boxed{5\text{ cm}}"),
    ("yes", r"\boxed{\text{Yes}.}"),
    ("1234", r"\fbox{1{,}234}"),
    (r"\{1,2\}", r"\boxed{\{1, 2\}}"),
    ("7", r"\boxed{8}, no: \boxed{7}"),
    ("12", "$x=3$, in all 12"),
    (r"\frac{1}{2}", r"\boxed{\dfrac{2}{4}}"),
]
UNEQUAL_VALUES = [
    ("4", "5"),
    ("4", "4 or 5"),
    ("4", r"4, that is \boxed{5}"),
    ("-3", "10-3"),
    ("x^2+1", "1"),
    ("4", "four"),
    ("4", ""),
    ("7", r"\boxed{8} then \boxed{7"),
    ("4", r"\boxed{}"),
    ("4", "v1.2.4b"),
    ("12", r"\boxed{1 2}"),
    (r"\frac{1}{23}", r"\boxed{\frac{12}{3}}"),
    ("$", r"\boxed{}"),
]


@pytest.mark.parametrize(("label", "text"), EQUAL_VALUES)
def test_equal_values_score(label: str, text: str) -> None:
    question = group(text, label=label)
    assert answer(question.prompt, question.samples[0]) == Reward(1.0, 1.0)
    boxed = "boxed{" in text or "fbox{" in text
    assert math(question.prompt, question.samples[0]) == Reward(float(boxed), float(boxed))


@pytest.mark.parametrize(("label", "text"), UNEQUAL_VALUES)
def test_unequal_values_do_not_score(label: str, text: str) -> None:
    question = group(text, label=label)
    assert (
        answer(question.prompt, question.samples[0]) == math(question.prompt, question.samples[0]) == Reward(0.0, 0.0)
    )


@pytest.mark.parametrize(
    "latex",
    [
        "9^{9^{9}}",
        "9^9^9",
        "((9999^{9999})^{99})^{99}",
        "(((9^{99})^{99})^{99})^{99}",
        r"\binom{999!}{500!}",
        "(a+b+c+d+e+f)^{99}",
        r"9999^{9999} \cdot 9998^{9998} \cdot 9997^{9997}",
        r"\int_0^1 \sin(x^{99})e^x",
        r"\sqrt[99]{9999^{9999}+1}",
        r"\frac{1}{(x+y+z)^{50}(x-y)^{50}}",
        r"\left(9999^{9999}\right)!",
        r"\sum_{n=1}^{\infty} \frac{1}{n^n}",
        "10^{10^{10^{10}}}",
        "(x+1)^{100000}",
        "(x+1)^{999}",
        r"\sum_{n=1}^{999} \frac{1}{n^n}",
        "100000!",
        "30!!!",
        r"\binom{1000000}{500000}",
        "{" * 3000 + "1" + "}" * 3000,
        r"\frac{" * 500 + "1" + "}{2}" * 500,
        "(1," * 300,
        "1" * 5000,
        r"\sum_{n=1}^{9} \prod_{k=1}^{n} \int_0^k x^x dx",
    ],
)
def test_formulas_too_expensive_for_sympy_are_compared_as_text(latex: str) -> None:
    assert not is_safe(latex)
    assert not equal("3", latex)
    assert equal(latex, f" {latex}")


@pytest.mark.parametrize("latex", [r"\frac{2^{2024}-1}{3}", "(1+x)^{99}", r"\left(3+\sqrt{5}\right)^{20}"])
def test_large_numbers_and_powers_of_real_answers_are_computed(latex: str) -> None:
    assert is_safe(latex)


@pytest.mark.parametrize("latex", ["2^{10}", "5!", r"\binom{10}{3}", r"x^{2n+1}", r"\int_0^1 x\,dx", r"10^{-6}"])
def test_common_answers_are_computed(latex: str) -> None:
    assert is_safe(latex)


def test_values_are_compared_if_texts_differ() -> None:
    assert equal("1024", "2^{10}")
    assert not equal("1025", "2^{10}")


def test_text_of_a_model_is_never_evaluated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No path may reach sympy's ``parse_expr``, which calls ``eval``."""

    def fail_on_parse(*args: object) -> None:
        raise AssertionError(f"eval was called on {args[0]!r}")

    monkeypatch.setattr(builtins, "eval", fail_on_parse)
    target = tmp_path / "owned"
    attack = f"__import__('pathlib').Path('{target}').touch()"
    for text in ("3+1", "(2+2)*1", "2**2", attack, f"${attack}$", rf"\boxed{{{attack}}}", f"answer: 1+{attack}"):
        question = group(text, label="1/3 + 2")
        assert answer(question.prompt, question.samples[0]).score == 0.0
        assert math(question.prompt, question.samples[0]).score == 0.0
    assert not target.exists()


def test_without_formula_or_number_there_is_no_answer() -> None:
    assert final_answer("I do not know.") is None


def test_exact_ignores_only_surrounding_spaces() -> None:
    question = group(" 4\n", "4.0", "the 4", label="4 ")
    assert [exact(question.prompt, s).score for s in question.samples] == [1.0, 0.0, 0.0]


@pytest.mark.parametrize("reward", [math, answer, exact])
def test_a_missing_label_names_the_prompt(reward: RewardFn) -> None:
    question = group("4", label=None)
    with pytest.raises(ValueError, match="prompt 7 of train has no label"):
        reward(question.prompt, question.samples[0])
