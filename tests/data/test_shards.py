"""Rows dealt to any number of ranks, and columns back."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from slime_like.batch import PackedBatch, StepBatch, TrainBatch
from slime_like.data.shards import NO_ROWS, deal, redeal, shards


def rows(number: int) -> PackedBatch:
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


@settings(deadline=None, max_examples=40)
@given(dp=st.integers(1, 4), sizes=st.lists(st.integers(1, 3), min_size=1, max_size=3), other=st.integers(1, 5))
def test_columns_come_back_to_their_rows(dp: int, sizes: list[int], other: int) -> None:
    counter = iter(range(1000))
    steps = [StepBatch(tuple(tuple(rows(next(counter)) for _ in range(m)) for _ in range(dp)), 1) for m in sizes]
    batch = TrainBatch(0, tuple(steps))
    assert shards(batch, dp) == [[list(step.rows[rank]) for step in steps] for rank in range(dp)]
    dealt = shards(batch, other)
    for k in range(len(sizes)):
        assert len({len(shard[k]) for shard in dealt}) == 1  # as many micro-batches on each rank
    columns = [[[row.token_ids.astype(np.float32) for row in step] for step in shard] for shard in dealt]
    for rank, back in enumerate(redeal(columns, batch, dp)):
        for step, found in zip(steps, back, strict=True):
            for row, column in zip(step.rows[rank], found, strict=True):
                assert column.tolist() == row.token_ids.tolist()


def test_what_is_missing_is_empty() -> None:
    assert deal([1, 2, 3], 2, 0) == [[1, 2], [3, 0]]
    assert len(NO_ROWS.token_ids) == 0
