"""Rewards that slime's data files name."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from slime_like.config.schema.rollout import RewardConfig
from slime_like.reward.check import row_rule
from slime_like.reward.latex import last_boxed
from slime_like.reward.worker import ScoreRequest, answer
from slime_like.types import Reward
from tests.hypothesis_examples import num_examples
from tests.reward.scored import group

CORRECT, INCORRECT = Reward(1.0, 1.0), Reward(0.0, 0.0)


def score(name: str, text: str, label: str | None = "4", metadata: Mapping[str, Any] | None = None) -> Reward:
    """Return the reward that a worker of the pool computes."""
    unscored = group(text, label=label, metadata=metadata)
    reply = answer(ScoreRequest(name, unscored.prompt, unscored.samples))
    assert not reply.fault, reply.fault
    return reply.rewards[0]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (r"let me think</think>so \boxed{4}", CORRECT),
        (r"</think> \boxed{5} wait </think> \boxed{4.0}", CORRECT),
        (r"### Instruction ###Response \boxed{4}", CORRECT),
        (r"</think> the answer is 4", INCORRECT),
        (r"\boxed{4}</think> done", INCORRECT),
        (r"\boxed{4}", INCORRECT),
        (r"</think> \boxed{4", INCORRECT),
        ("", INCORRECT),
    ],
)
def test_deepscaler_scores_the_text_after_thinking(text: str, expected: Reward) -> None:
    assert score("deepscaler", text) == expected


@pytest.mark.parametrize(
    ("label", "text", "is_correct"),
    [
        ("34", "so\nAnswer: 34", True),
        ("34", "**Answer: $34$**", True),
        ("34", r"Answer: \boxed{34}.", True),
        ("34", r"answer : $x = 34$<|im_end|>", True),
        ("34.0", "Answer: 34", True),
        ("34", "Answer: 33\nAnswer: 34", True),
        ("34", "Answer: 34\nAnswer: 33", False),
        ("34", "The result is 34", False),
        ("34", "Answer:\n34", False),
        ("34", "Answer: 34" + " " * 300, False),
        (r"\frac{1}{2}", "Answer: 0.5", True),
    ],
)
def test_dapo_scores_plus_and_minus_one_and_reports_an_accuracy(label: str, text: str, is_correct: bool) -> None:
    assert score("dapo", text, label) == Reward(1.0 if is_correct else -1.0, float(is_correct))


@pytest.mark.parametrize(
    ("label", "text", "expected"),
    [
        ("The Eiffel Tower", "eiffel tower!", 1.0),
        ("Eiffel Tower", "the tower of Paris", 0.4),
        ("Eiffel Tower", "Big Ben", 0.0),
        ("yes", "yes, it is", 0.0),
        ("yes", "Yes.", 1.0),
        ("it is", "no", 0.0),
        ("word", "", 0.0),
    ],
)
def test_f1_equals_squads(label: str, text: str, expected: float) -> None:
    assert score("f1", text, label).score == pytest.approx(expected)
    assert score("f1", text, label).accuracy is None


@settings(max_examples=num_examples(60), deadline=None)
@given(
    st.lists(st.sampled_from(["red", "blue", "green"]), min_size=1),
    st.lists(st.sampled_from(["red", "blue", "sky"]), min_size=1),
)
def test_f1_is_the_harmonic_mean_of_precision_and_recall(label: list[str], text: list[str]) -> None:
    common = sum(min(label.count(word), text.count(word)) for word in set(label))
    precision, recall = common / len(text), common / len(label)
    expected = 2 * precision * recall / (precision + recall) if common else 0.0
    assert score("f1", " ".join(text), " ".join(label)).score == pytest.approx(expected)


CHOICES = {"choices": ["red light", "blue light", "no light", "sound"]}


@pytest.mark.parametrize(
    ("label", "metadata", "text", "expected"),
    [
        ("C", {}, "The answer is C.", CORRECT),
        ("C", {}, "Answer: (c)", CORRECT),
        ("C", {}, r"The answer is $\boxed{\text{C}}$", CORRECT),
        ("C", {}, "B looks right, but the answer is C", CORRECT),
        ("C", {}, "The answer is B. Wait, the answer is C.", CORRECT),
        ("C", {}, "I choose option C because A is wrong", CORRECT),
        ("C", {}, "</think>C", CORRECT),
        ("C", {}, "The answer is C</think>B", INCORRECT),
        ("C", {}, "the answer is a mixture", INCORRECT),
        ("C", {}, "Z", INCORRECT),
        ("B", CHOICES, "D", INCORRECT),
        ("blue light", CHOICES, "Option B", CORRECT),
        ("blue light", CHOICES, "it must be blue light", CORRECT),
        ("1", CHOICES, "B", CORRECT),
        (None, CHOICES | {"correct_letter": "d"}, "D", CORRECT),
        (None, {"choices": {"A": "x", "B": "y"}, "correct_letter": "B"}, "y", CORRECT),
        ("B", {"choices": {"B": "x", "A": "y"}}, "x", CORRECT),
        ("B", {"choices": {"B": "x", "A": "y"}}, "y", INCORRECT),
        ("x", {"choices": {"b": "x", "a": "y"}}, "Answer: B", CORRECT),
        ("0", {"choices": {"B": "x", "A": "y"}}, "Answer: A", CORRECT),
        ("y", {"choices": {"C": "x", "D": "y"}}, "Answer: D", CORRECT),
        ("D", {"choices": {"D": "x", "A": "y"}, "valid_letters": ["A", "B", "D"]}, "x", CORRECT),
        ("sound", {}, "a sound", CORRECT),
        ("sound", {}, "resounding", INCORRECT),
        ("Q", {"valid_letters": ["P", "Q"]}, "Q", CORRECT),
    ],
)
def test_gpqa_reads_the_final_option_of_a_response(
    label: str | None, metadata: dict[str, Any], text: str, expected: Reward
) -> None:
    assert score("gpqa", text, label, metadata) == expected


def test_the_boxed_prefix_scores_only_the_last_box() -> None:
    assert score("boxed_gpqa", r"The answer is A. \boxed{C}", "C") == CORRECT
    assert score("boxed_gpqa", "The answer is C", "C") == INCORRECT
    assert score("boxed_f1", r"red \boxed{sky blue}", "blue sky").score == 1.0
    assert score("boxed_exact", r"\boxed{4} then \boxed{ 5 }", "5") == CORRECT


def test_a_box_ends_at_its_closing_brace() -> None:
    assert last_boxed(r"\boxed{\frac{1}{2}} and \boxed{ \{1, 2\} } end") == r" \{1, 2\} "
    assert last_boxed(r"\boxed{7} and \boxed{8") is None
    assert last_boxed(r"\boxed{\boxed{3}}") == "3"
    assert last_boxed("boxed{3}") is None


@pytest.mark.parametrize(
    ("rm_type", "label", "metadata", "message"),
    [
        ("gpqa", None, {}, "neither a label nor metadata.correct_letter"),
        (
            "gpqa",
            None,
            {"correct_letter": "E", "choices": ["a", "b"]},
            "correct option is 'E', which is not one of A, B",
        ),
        (
            "gpqa",
            "0",
            {"choices": {"0": "x", "1": "y"}},
            "metadata.choices has the keys '0', '1'; a mapping needs the letters",
        ),
        ("gpqa", "A", {"choices": {"A": "x", "a": "y"}}, "metadata.choices has the keys 'A', 'a'"),
        ("gpqa", "B", {"choices": {"B": "x", "A": "y"}}, ""),
        ("boxed_gpqa", None, {}, "neither a label"),
        ("f1", "the ...", {}, "label 'the ...' has no words"),
        ("math", "4", {}, ""),
        ("gpqa", "C", {}, ""),
    ],
)
def test_a_row_without_a_possible_right_answer_is_refused(
    rm_type: str, label: str | None, metadata: dict[str, Any], message: str
) -> None:
    problem = row_rule(RewardConfig())(rm_type, label, metadata)
    assert message in problem and bool(message) == bool(problem)
