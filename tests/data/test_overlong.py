"""DAPO's soft overlong penalty."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slime_like.data.assemble import AssembleSpec, assemble
from slime_like.data.overlong import OverlongPenalty
from slime_like.metrics.types import Mean
from slime_like.types import Status
from tests.algo.samples import SampleShape, groups_of

RULE = OverlongPenalty(max_len=10, buffer_len=4, factor=0.5)


def group(*lengths: int, status: Status = Status.COMPLETED):
    return groups_of([[SampleShape((1, n, 0, 0), 1.0, status) for n in lengths]])[0]


@pytest.mark.parametrize(("length", "penalty"), [(1, 0.0), (6, 0.0), (7, 0.125), (9, 0.375), (10, 0.5), (30, 0.5)])
def test_the_penalty_grows_over_the_buffer(length: int, penalty: float) -> None:
    assert RULE.penalty(group(length).samples[0]) == pytest.approx(penalty)


@given(length=st.integers(1, 60), max_len=st.integers(2, 40), share=st.floats(0.05, 1))
def test_the_penalty_is_the_papers_length_reward_negated(length: int, max_len: int, share: float) -> None:
    buffer = max(1, int(max_len * share))
    expected = max_len - buffer
    paper = 0.0 if length <= expected else (expected - length) / buffer if length <= max_len else -1.0
    assert OverlongPenalty(max_len, buffer, 1.0).penalty(group(length).samples[0]) == pytest.approx(-paper)


def test_scores_fall_and_accuracies_stay() -> None:
    unscored = group(6, 8, 10)
    scored_group = replace(
        unscored,
        samples=tuple(replace(s, reward=replace(s.reward, accuracy=1.0)) for s in unscored.samples if s.reward),
    )
    (penalized,) = RULE.penalise([scored_group])
    assert [s.reward.score for s in penalized.samples if s.reward] == [1.0, 0.75, 0.5]
    assert [s.reward.accuracy for s in penalized.samples if s.reward] == [1.0] * 3
    assert RULE.metrics([scored_group]) == [Mean("rollout/overlong_penalty", 0.25)]


def test_failed_samples_are_not_penalized() -> None:
    failed_group = group(10, status=Status.FAILED)
    assert RULE.penalise([failed_group]) == [failed_group]
    assert RULE.metrics([failed_group]) == []


def test_advantages_and_token_rewards_use_shaped_scores() -> None:
    spec = AssembleSpec(lambda rewards_G: rewards_G, "token_mean", 1, 1, 1000, 10, overlong=RULE)
    (rows,) = assemble([group(6, 8, 10)], spec, 0).steps[0].micro_batches[0]
    assert rows.advantages is not None
    by_sample = dict(zip(rows.sample_ids.tolist(), zip(rows.advantages, rows.rewards, strict=True), strict=True))
    assert by_sample == {0: (1.0, 1.0), 1: (0.75, 0.75), 2: (0.5, 0.5)}
