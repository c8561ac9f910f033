"""Batch assembly: loss weights, columns and steps, independent of packing."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from slime_like.algo.advantage import dr_grpo, grpo
from slime_like.batch import PackedBatch, StepBatch
from slime_like.data.assemble import FILLER_ID, AssembleSpec, assemble
from slime_like.errors import ConfigError, DataError, EngineError
from slime_like.types import Reward, SampleGroup, Source, Span, Status
from tests.algo.samples import SampleShape, batches, groups_of
from tests.hypothesis_examples import num_examples

SPEC = AssembleSpec(grpo, "token_mean", 1, 1, 1000, 16)
COMPLETED = Status.COMPLETED
FAILURES = "(aborted|failed) [0-9]+"
TRAINS_NOTHING = rf"none of its [0-9]+ samples has a token to train on \({FAILURES}(, {FAILURES})*\)"


def rows_of(step: StepBatch) -> list[PackedBatch]:
    return [row for rank in step.micro_batches for row in rank]


def per_sample(step: StepBatch, name: str) -> dict[int, list[float]]:
    """Return a [T] or [S] column by sample id."""
    values: dict[int, list[float]] = {}
    for row in rows_of(step):
        column = np.atleast_1d(getattr(row, name))
        for i, sample_id in enumerate(row.sample_ids.tolist()):
            per_token = name not in ("advantages", "rewards")
            a, b = (row.cu_seqlens[i], row.cu_seqlens[i + 1]) if per_token else (i, i + 1)
            values[sample_id] = column[a:b].tolist()
    values.pop(FILLER_ID, None)
    return values


@pytest.mark.parametrize("aggregation", ["token_mean", "sequence_mean", "dr_grpo"])
@settings(max_examples=num_examples(20), deadline=None)
@given(groups=batches(), dp=st.integers(1, 4), budget=st.integers(1, 30), steps=st.integers(1, 2))
def test_every_sample_is_packed_once_and_weights_sum_to_one(
    aggregation: str, groups: list[SampleGroup], dp: int, budget: int, steps: int
) -> None:
    total = sum(len(g.samples) for g in groups)
    dp = min(dp, total // steps)
    spec = replace(SPEC, aggregation=aggregation, dp=dp, max_tokens_per_rank=budget, steps_per_rollout=steps)
    try:
        batch = assemble(groups, spec, rollout_id=3)
    except DataError as error:  # a step with failures only; each group has a completed sample
        assert steps > 1 and re.search(TRAINS_NOTHING, str(error)), error
        return
    samples = {s.sample_id: s for g in groups for s in g.samples}
    counts = Counter(int(i) for step in batch.steps for row in rows_of(step) for i in row.sample_ids if i != FILLER_ID)
    assert counts == Counter(list(samples))
    for step in batch.steps:
        assert len(step.micro_batches) == dp and len({len(rank) for rank in step.micro_batches}) == 1
        weights = np.concatenate([row.loss_weight for row in rows_of(step)])
        trained_ids = [i for i, w in per_sample(step, "loss_weight").items() if any(w)]
        expected = step.num_tokens / (16 * len(trained_ids)) if aggregation == "dr_grpo" else 1.0
        np.testing.assert_allclose(weights.sum(dtype=np.float64), expected, rtol=1e-5)
        assert int((weights > 0).sum()) == step.num_tokens
        for row in rows_of(step):
            assert len(row.token_ids) <= budget or len(row.sample_ids) == 1


@settings(max_examples=num_examples(20), deadline=None)
@given(groups=batches())
def test_columns_follow_the_spans(groups: list[SampleGroup]) -> None:
    step = assemble(groups, SPEC, rollout_id=0).steps[0]
    weight, version = per_sample(step, "loss_weight"), per_sample(step, "versions")
    logprobs, tokens = per_sample(step, "rollout_logprobs"), per_sample(step, "token_ids")
    for sample in (s for g in groups for s in g.samples):
        assert tokens[sample.sample_id] == sample.token_ids.tolist()
        for span in sample.spans:
            model = span.source is Source.MODEL
            for t in range(span.start, span.stop):
                is_counted = model and sample.status in (Status.COMPLETED, Status.TRUNCATED)
                assert (weight[sample.sample_id][t] > 0) == is_counted
                assert version[sample.sample_id][t] == (span.version if model else -1)
                assert logprobs[sample.sample_id][t] == (sample.logprobs[t] if model else 0.0)


def shape(reward: float, status: Status = COMPLETED, response: int = 2) -> SampleShape:
    return SampleShape((1, response, 0, 0), reward, status)


def test_failures_count_in_no_baseline_and_no_denominator() -> None:
    groups = groups_of([[shape(1.0), shape(0.0), shape(-99.0, Status.FAILED), shape(-99.0, Status.ABORTED)]])
    step = assemble(groups, replace(SPEC, group_advantage=dr_grpo), 0).steps[0]
    assert per_sample(step, "advantages") == {0: [0.5], 1: [-0.5], 2: [0.0], 3: [0.0]}
    assert step.num_tokens == 4
    assert per_sample(step, "loss_weight")[0] == [0, 0.25, 0.25]


def test_failures_are_never_read_for_logprobs() -> None:
    group = groups_of([[shape(1.0), shape(0.0, Status.FAILED)]])[0]
    sample_without_logprobs = replace(group.samples[1], logprobs=np.full(3, np.nan, dtype=np.float32))
    step = assemble([replace(group, samples=(group.samples[0], sample_without_logprobs))], SPEC, 0).steps[0]
    assert per_sample(step, "rollout_logprobs")[1] == [0.0, 0.0, 0.0]


def test_the_first_token_of_a_sequence_is_never_trained() -> None:
    """Nothing predicts the first token, even if the model sampled it."""
    group = groups_of([[SampleShape((0, 3, 0, 0), 1.0, COMPLETED)]])[0]
    step = assemble([group], SPEC, 0).steps[0]
    assert per_sample(step, "loss_weight") == {0: [0.0, 0.5, 0.5]}
    assert per_sample(step, "versions") == {0: [3, 3, 3]}


def test_mask_offpolicy_trains_only_the_newest_tokens_of_a_sample() -> None:
    (group,) = groups_of([[shape(1.0, response=4), shape(0.0)]])
    first, second = group.samples
    spans = (Span(0, 1, Source.PROMPT), Span(1, 3, Source.MODEL, 3), Span(3, 5, Source.MODEL, 4))
    groups = [replace(group, samples=(replace(first, spans=spans), second))]
    weights = {
        mask_offpolicy: per_sample(
            assemble(groups, replace(SPEC, mask_offpolicy=mask_offpolicy), 5).steps[0], "loss_weight"
        )
        for mask_offpolicy in (False, True)
    }
    assert weights[False] == {0: pytest.approx([0, *[1 / 6] * 4]), 1: pytest.approx([0, *[1 / 6] * 2])}
    assert weights[True] == {0: [0, 0, 0, 0.25, 0.25], 1: [0, 0.25, 0.25]}


def test_the_baseline_is_the_samples_own_group() -> None:
    """Rewards of one group never count in the baseline of another, for groups of unequal sizes and levels."""
    groups = groups_of([[shape(1.0), shape(0.0)], [shape(10.0), shape(20.0), shape(60.0)], [shape(5.0), shape(5.0)]])
    step = assemble(groups, replace(SPEC, group_advantage=dr_grpo), 0).steps[0]
    assert per_sample(step, "advantages") == {0: [0.5], 1: [-0.5], 2: [-20], 3: [-10], 4: [30], 5: [0], 6: [0]}
    assert per_sample(step, "rewards") == {0: [1], 1: [0], 2: [10], 3: [20], 4: [60], 5: [5], 6: [5]}


def test_each_step_is_weighted_by_its_own_tokens() -> None:
    groups = groups_of([[shape(1.0, response=1), shape(0.0, response=3)], [shape(1.0, response=9), shape(0.0)]])
    short_step, long_step = assemble(groups, replace(SPEC, steps_per_rollout=2), 0).steps
    assert (short_step.num_tokens, long_step.num_tokens) == (4, 11)
    for step, weight in ((short_step, 1 / 4), (long_step, 1 / 11)):
        weights = [w for ws in per_sample(step, "loss_weight").values() for w in ws if w]
        assert weights == pytest.approx([weight] * step.num_tokens)


def test_an_episode_of_two_samples_counts_once() -> None:
    group = groups_of([[shape(0.0, response=2), shape(1.0, response=2), shape(2.0, response=4)]])[0]
    samples = tuple(replace(s, episode_id=min(s.episode_id, 1)) for s in group.samples)
    spec = replace(SPEC, group_advantage=dr_grpo, aggregation="sequence_mean")
    step = assemble([replace(group, samples=samples)], spec, 0).steps[0]
    assert per_sample(step, "advantages") == {0: [-0.75], 1: [0.75], 2: [0.75]}
    weights = {i: sum(w) for i, w in per_sample(step, "loss_weight").items()}
    assert weights == pytest.approx({0: 1 / 2, 1: 1 / 6, 2: 1 / 3})


def test_without_group_advantage_the_ranks_compute_the_column() -> None:
    row = assemble(groups_of([[shape(1.0)]]), replace(SPEC, group_advantage=None), 0).steps[0].micro_batches[0][0]
    assert row.advantages is None
    assert row.rewards.tolist() == [1.0]


def steps_of(sizes: Sequence[int], steps: int, dp: int = 1) -> list[list[int]]:
    groups = groups_of([[shape(float(i)) for i in range(n)] for n in sizes])
    batch = assemble(groups, replace(SPEC, steps_per_rollout=steps, dp=dp), 0)
    return [sorted(per_sample(step, "loss_weight")) for step in batch.steps]


def test_groups_stay_whole_within_a_step() -> None:
    assert [len(s) for s in steps_of([4, 4, 4, 4], 2)] == [8, 8]
    assert [len(s) for s in steps_of([1, 5, 2, 4], 2)] == [6, 6]
    assert [len(s) for s in steps_of([3, 3, 3], 2)] == [3, 6]


def test_one_group_for_two_steps_is_split_in_order() -> None:
    assert steps_of([5], 2) == [[0, 1], [2, 3, 4]]


def test_groups_are_split_if_a_rank_would_be_empty() -> None:
    assert steps_of([1, 7], 2, dp=4) == [[0, 1, 2, 3], [4, 5, 6, 7]]


def test_fewer_samples_than_ranks_names_the_keys() -> None:
    with pytest.raises(
        ConfigError, match=r"3 samples cannot feed loop.steps_per_rollout=2 .+ dp=2.+rollout.batch_size"
    ):
        steps_of([3], 2, dp=2)


def test_a_step_of_failures_is_refused() -> None:
    with pytest.raises(DataError, match=r"rollout 4, optimizer step 0: none of its 2 samples .+\(failed 2\)"):
        assemble(groups_of([[shape(0.0, Status.FAILED)] * 2]), SPEC, 4)


def test_an_empty_rollout_has_no_steps() -> None:
    batch = assemble([], SPEC, 2)
    assert (batch.rollout_id, batch.steps, batch.num_tokens) == (2, (), 0)


@pytest.mark.parametrize("value", [math.nan, -math.inf])
def test_a_sampled_token_without_a_finite_logprob_is_refused(value: float) -> None:
    group = groups_of([[shape(1.0)]])[0]
    sample_without_logprobs = replace(group.samples[0], logprobs=np.full(3, value, dtype=np.float32))
    with pytest.raises(EngineError, match="sample 0 of group 0: 2 of its 2 sampled tokens have no finite log-prob"):
        assemble([replace(group, samples=(sample_without_logprobs,))], SPEC, 0)


def test_uneven_ranks_get_a_filler_of_zero_weight() -> None:
    groups = groups_of([[shape(1.0, response=9), shape(0.0, response=9), shape(0.5, response=9)]])
    step = assemble(groups, replace(SPEC, dp=2, max_tokens_per_rank=10), 0).steps[0]
    fillers = [row for row in rows_of(step) if FILLER_ID in row.sample_ids]
    assert [len(rank) for rank in step.micro_batches] == [2, 2]
    assert len(fillers) == 1 and not fillers[0].loss_weight.any()
    assert step.num_tokens == 27


def test_extras_are_packed_with_their_tokens() -> None:
    group = groups_of([[shape(1.0), shape(0.0)]])[0]
    samples = tuple(replace(s, extras={"experts": np.full((3, 2), s.sample_id)}) for s in group.samples)
    row = assemble([replace(group, samples=samples)], SPEC, 0).steps[0].micro_batches[0][0]
    assert row.extras["experts"].shape == (6, 2)
    assert row.extras["experts"][:, 0].tolist() == np.repeat(row.sample_ids, 3).tolist()
    with pytest.raises(EngineError, match="samples 0 and 1 have different extras"):
        assemble([replace(group, samples=(samples[0], group.samples[1]))], SPEC, 0)


def test_rewards_are_not_modified() -> None:
    groups = groups_of([[shape(1.0), shape(0.0)]])
    assemble(groups, SPEC, 0)
    assert [s.reward for s in groups[0].samples] == [Reward(1.0), Reward(0.0)]
