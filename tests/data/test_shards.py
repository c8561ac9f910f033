"""Distribution of rows to any number of ranks, and of columns back."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from slime_like.batch import NO_ROWS, PackedBatch, StepBatch, TrainBatch, deal, redeal, shards


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
@given(dp=st.integers(1, 4), sizes=st.lists(st.integers(1, 3), min_size=1, max_size=3), num_ranks=st.integers(1, 5))
def test_columns_return_to_their_rows(dp: int, sizes: list[int], num_ranks: int) -> None:
    counter = iter(range(1000))
    steps = [StepBatch(tuple(tuple(rows(next(counter)) for _ in range(m)) for _ in range(dp)), 1) for m in sizes]
    batch = TrainBatch(0, tuple(steps))
    assert shards(batch, dp) == [[list(step.rows[rank]) for step in steps] for rank in range(dp)]
    dealt = shards(batch, num_ranks)
    for k in range(len(sizes)):
        assert len({len(shard[k]) for shard in dealt}) == 1  # equally many micro-batches on each rank
    columns = [[[row.token_ids.astype(np.float32) for row in step] for step in shard] for shard in dealt]
    for rank, returned in enumerate(redeal(columns, batch, dp)):
        for step, step_columns in zip(steps, returned, strict=True):
            for row, column in zip(step.rows[rank], step_columns, strict=True):
                assert column.tolist() == row.token_ids.tolist()


def test_missing_rows_are_filled_with_empty_ones() -> None:
    assert deal([1, 2, 3], 2, 0) == [[1, 2], [3, 0]]
    assert len(NO_ROWS.token_ids) == 0
