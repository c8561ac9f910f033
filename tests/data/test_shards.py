"""Distribution of micro-batches to any number of ranks, and of columns back."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from slime_like.batch import EMPTY_BATCH, PackedBatch, StepBatch, TrainBatch, redistribute, shards, split_equally
from tests.hypothesis_examples import num_examples


def micro_batch(number: int) -> PackedBatch:
    size = number % 3 + 1
    zeros = np.zeros(size, np.float32)
    return PackedBatch(
        token_ids=np.full(size, number, np.int32),
        cu_seqlens=np.array([0, size], np.int32),
        loss_weight=zeros,
        versions=np.zeros(size, np.int32),
        rollout_logprobs=zeros,
        rewards=np.zeros(1, np.float32),
        advantages=None,
        sample_ids=np.array([number], np.int64),
    )


@settings(deadline=None, max_examples=num_examples(40))
@given(dp=st.integers(1, 4), sizes=st.lists(st.integers(1, 3), min_size=1, max_size=3), num_ranks=st.integers(1, 5))
def test_columns_return_to_their_micro_batches(dp: int, sizes: list[int], num_ranks: int) -> None:
    counter = iter(range(1000))
    steps = [StepBatch(tuple(tuple(micro_batch(next(counter)) for _ in range(m)) for _ in range(dp)), 1) for m in sizes]
    batch = TrainBatch(0, tuple(steps))
    assert shards(batch, dp) == [[list(step.micro_batches[rank]) for step in steps] for rank in range(dp)]
    redistributed = shards(batch, num_ranks)
    for k in range(len(sizes)):
        assert len({len(shard[k]) for shard in redistributed}) == 1  # equally many micro-batches on each rank
    columns = [[[row.token_ids.astype(np.float32) for row in step] for step in shard] for shard in redistributed]
    for rank, rank_steps in enumerate(redistribute(columns, batch, dp)):
        for step, step_columns in zip(steps, rank_steps, strict=True):
            for row, column in zip(step.micro_batches[rank], step_columns, strict=True):
                assert column.tolist() == row.token_ids.tolist()


def test_missing_micro_batches_are_filled_with_empty_ones() -> None:
    assert split_equally([1, 2, 3], 2, 0) == [[1, 2], [3, 0]]
    assert len(EMPTY_BATCH.token_ids) == 0
