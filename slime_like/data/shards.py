"""Rows of a batch dealt to any number of data-parallel ranks, and columns dealt from one such number to another."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from slime_like.batch import Columns, PackedBatch, TrainBatch

Shard = list[list[PackedBatch]]
"""Micro-batches of one data-parallel rank, per optimizer step."""


def deal[Item](items: Sequence[Item], ranks: int, filler: Item) -> list[list[Item]]:
    """``items`` in order on ``ranks``, as many on each; what is missing at the end is ``filler``.

    Example: ``deal([1, 2, 3], 2, 0) == [[1, 2], [3, 0]]``.
    """
    each = -(-len(items) // ranks)
    padded = [*items, *[filler] * (each * ranks - len(items))]
    return [padded[rank * each : (rank + 1) * each] for rank in range(ranks)]


def shards(batch: TrainBatch, ranks: int) -> list[Shard]:
    """The rows of every step on ``ranks``; as the batch has them when it was assembled for so many."""
    dealt = [deal([rows for rank in step.rows for rows in rank], ranks, NO_ROWS) for step in batch.steps]
    return [[step[rank] for step in dealt] for rank in range(ranks)]


def redeal(columns: Sequence[Columns], batch: TrainBatch, ranks: int) -> list[Columns]:
    """Columns per rank of any dealing of ``batch``, dealt to ``ranks``."""
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
"""A micro-batch without tokens: a rank must take part in as many as the others."""
