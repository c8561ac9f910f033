"""Distribution of a batch's rows over data-parallel ranks, and redistribution of columns."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from slime_like.batch import Columns, PackedBatch, TrainBatch

Shard = list[list[PackedBatch]]
"""Micro-batches of one data-parallel rank, per optimizer step."""


def deal[Item](items: Sequence[Item], ranks: int, filler: Item) -> list[list[Item]]:
    """Split ``items``, in order, into ``ranks`` lists of equal length, padded with ``filler``.

    Example: ``deal([1, 2, 3], 2, 0) == [[1, 2], [3, 0]]``.
    """
    each = -(-len(items) // ranks)
    padded = [*items, *[filler] * (each * ranks - len(items))]
    return [padded[rank * each : (rank + 1) * each] for rank in range(ranks)]


def shards(batch: TrainBatch, ranks: int) -> list[Shard]:
    """Split the rows of every step over ``ranks``; no change if the batch was assembled for as many."""
    dealt = [deal([rows for rank in step.rows for rows in rank], ranks, NO_ROWS) for step in batch.steps]
    return [[step[rank] for step in dealt] for rank in range(ranks)]


def redeal(columns: Sequence[Columns], batch: TrainBatch, ranks: int) -> list[Columns]:
    """Redistribute per-rank columns of ``batch`` over ``ranks``."""
    dealt = []
    for k, step in enumerate(batch.steps):
        flat = [column for rank in columns for column in rank[k]][: sum(len(rank) for rank in step.rows)]
        dealt.append(deal(flat, ranks, NO_TOKENS))
    return [[step[rank] for step in dealt] for rank in range(ranks)]


NO_TOKENS = np.zeros(0, dtype=np.float32)
NO_ROWS = PackedBatch(
    token_ids=np.zeros(0, dtype=np.int32),
    cu_seqlens=np.zeros(1, dtype=np.int32),
    loss_weight=NO_TOKENS,
    versions=np.zeros(0, dtype=np.int32),
    rollout_logprobs=NO_TOKENS,
    rewards=NO_TOKENS,
    advantages=None,
    sample_ids=np.zeros(0, dtype=np.int64),
)
"""Micro-batch without tokens: every rank must run the same number of micro-batches."""
