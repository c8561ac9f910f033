"""Warnings of a run that learns nothing: at the first empty rollout, and at the third without differing rewards."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from slime_like.data.overlong import OverlongPenalty
from slime_like.metrics.dictionary import unknown_names
from slime_like.metrics.types import RunWarning, reduce_metrics
from slime_like.rollout.selection import LearningSignal
from slime_like.types import SampleGroup, Source, Span, Status
from tests.rollout.scored import group

GOOD = (group([0.0, 1.0]), group([1.0, 1.0]))
ZERO = (group([0.0, 0.0], label="2"), group([0.0, 0.0]))
FLAT = (group([1.0, 1.0]), group([0.0, 0.0]))
EMPTY: tuple[SampleGroup, ...] = ()


def observe(signal: LearningSignal, *rollouts: tuple[SampleGroup, ...], waiting: int = 0) -> list[list[RunWarning]]:
    return [
        signal.observe(number, groups, waiting, "4 groups were generated, mine dropped 4 (True)", ZERO[0])
        for number, groups in enumerate(rollouts)
    ]


def streaks(signal: LearningSignal) -> tuple[float, float]:
    values = reduce_metrics(signal.metrics())
    assert not unknown_names(values)
    return values["rollout/empty_in_a_row"], values["rollout/without_signal_in_a_row"]


def test_the_first_empty_rollout_is_named_with_a_sample_and_its_label() -> None:
    signal = LearningSignal("group")
    ((warning,),) = observe(signal, EMPTY)
    assert warning.text == "rollout 0 is empty: nothing is trained on; 4 groups were generated, mine dropped 4 (True)"
    assert warning.example == "prompt 7 with label '2', reward 0, completed: 'answer 0'"
    assert warning.example in str(warning)
    assert streaks(signal) == (1, 0)
    assert [len(warnings) for warnings in observe(signal, *[EMPTY] * 9)] == [0] * 8 + [1], "repeated at the tenth"
    observe(signal, GOOD)
    assert streaks(signal) == (0, 0)


def test_groups_carried_to_the_next_step_give_no_warning() -> None:
    signal = LearningSignal("group")
    assert observe(signal, EMPTY, EMPTY, waiting=3) == [[], []]
    assert streaks(signal) == (0, 0)


@pytest.mark.parametrize(
    ("baseline", "rollout", "words"),
    [
        ("group", ZERO, "every sample has reward 0, so every advantage is 0; does the response have the form"),
        ("batch", ZERO, "every sample has reward 0"),
        ("group", FLAT, "in every group all samples have the same reward"),
    ],
)
def test_the_third_rollout_without_signal_is_named(baseline: str, rollout: tuple[SampleGroup, ...], words: str) -> None:
    signal = LearningSignal(baseline)
    assert [bool(warnings) for warnings in observe(signal, rollout, rollout, GOOD, rollout, rollout)] == [False] * 5
    ((warning,),) = observe(signal, rollout)
    assert (
        warning.text.startswith("3 rollouts in a row have no learning signal: ")
        and words in warning.text
        and warning.example
    )
    assert streaks(signal) == (0, 3)


def test_rewards_that_the_algorithm_does_not_compare_give_no_warning() -> None:
    assert not any(observe(LearningSignal("batch"), *[FLAT] * 5))
    assert not any(observe(LearningSignal("none"), *[ZERO] * 5))


def test_rewards_that_differ_by_overlong_penalty_give_no_warning() -> None:
    short, twin = ZERO[0].samples
    n = len(twin.token_ids)
    longer = replace(
        twin,
        token_ids=np.arange(n + 4, dtype=np.int32),
        logprobs=np.zeros(n + 4, np.float32),
        spans=(*twin.spans, Span(n, n + 4, Source.MODEL, 0)),
    )
    unequal_lengths = (replace(ZERO[0], samples=(short, longer)),)
    penalty = OverlongPenalty(max_len=longer.num_response_tokens, buffer_len=4, factor=1.0)
    assert not any(observe(LearningSignal("group", penalty), *[unequal_lengths] * 5))
    assert any(observe(LearningSignal("group"), *[unequal_lengths] * 5))


def test_the_reward_of_a_failed_sample_is_not_a_learning_signal() -> None:
    failed = group([1.0, 0.0])
    failed = replace(failed, samples=(failed.samples[0], replace(failed.samples[1], status=Status.FAILED)))
    assert [bool(warnings) for warnings in observe(LearningSignal("group"), *[(failed,)] * 3)] == [False, False, True]
