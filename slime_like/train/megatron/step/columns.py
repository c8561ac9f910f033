"""Per-token columns that one role computes and another reads: values, returns, a teacher's log-probabilities."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from slime_like.batch import Columns
from slime_like.train.megatron.model.forward import MicroBatch, to_device
from slime_like.train.megatron.platform.groups import RankInfo
from slime_like.types import F32


def nested(columns: Sequence[F32], plan: Sequence[Sequence[MicroBatch]]) -> Columns:
    """Group the columns of all micro-batches by optimizer step, as in ``plan``."""
    flat: Iterator[F32] = iter(columns)
    return [[next(flat) for _ in step] for step in plan]


def fill(plan: Sequence[Sequence[MicroBatch]], name: str, columns: Columns, rank_info: RankInfo) -> None:
    """Set field ``name`` of the micro-batches to ``columns``, on the ranks that compute losses."""
    if not rank_info.is_last:
        return
    for micros, values in zip(plan, columns, strict=True):
        for micro, column in zip(micros, values, strict=True):
            assert column.shape == (micro.layout.num_tokens,), f"{name}: {column.shape} for {micro.layout.num_tokens}"
            setattr(micro, name, to_device(column, rank_info.device))
