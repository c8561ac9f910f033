"""Training batches: micro-batches of packed, complete sequences, as numpy arrays that are sent to the ranks unchanged.

Entry ``t`` of a ``[T]`` column describes token ``t`` itself: ``rollout_logprobs[t]`` is the log-probability of token ``t``
given the tokens before it in its sequence, and ``loss_weight[t]`` the weight of that prediction (0 at a sequence's
first token). Position ids and next-token shifts are derived on the ranks by ``TokenLayout``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from slime_like.types import F32, I32, I64


@dataclass(frozen=True, slots=True)
class PackedBatch:
    """One packed micro-batch: S whole sequences, T tokens.

    Example: for sequences of 3 and 2 tokens, ``cu_seqlens`` is [0, 3, 5] and ``token_ids`` has 5 entries.
    """

    token_ids: I32  # [T]
    cu_seqlens: I32  # [S + 1]
    loss_weight: F32  # [T], sums to 1 over an optimizer step (all micro-batches and dp ranks), except under dr_grpo
    versions: I32  # [T], weight version that sampled the token, -1 if not sampled
    rollout_logprobs: F32  # [T], 0 if not sampled
    rewards: F32  # [S]
    advantages: F32 | None  # [S], None if the algorithm computes them per token on the ranks
    sample_ids: I64  # [S]
    extras: Mapping[str, npt.NDArray[Any]] = field(default_factory=dict[str, npt.NDArray[Any]])

    def __post_init__(self) -> None:
        t, s = len(self.token_ids), len(self.cu_seqlens) - 1
        assert int(self.cu_seqlens[-1]) == t, f"cu_seqlens ends at {self.cu_seqlens[-1]} of {t} tokens"
        for column in (self.loss_weight, self.versions, self.rollout_logprobs):
            assert column.shape == (t,), f"column of shape {column.shape} for {t} tokens"
        for column in (self.rewards, self.advantages, self.sample_ids):
            assert column is None or column.shape == (s,), f"column of shape {column.shape} for {s} sequences"


@dataclass(frozen=True, slots=True)
class StepBatch:
    """One optimizer step: ``micro_batches[dp][m]``, with equally many micro-batches for every dp rank."""

    micro_batches: tuple[tuple[PackedBatch, ...], ...]
    num_tokens: int  # trained tokens (loss_weight > 0) over all dp ranks


@dataclass(frozen=True, slots=True)
class TrainBatch:
    """All optimizer steps of one rollout."""

    rollout_id: int
    steps: tuple[StepBatch, ...]

    @property
    def num_tokens(self) -> int:
        """Return the number of trained tokens in the rollout."""
        return sum(step.num_tokens for step in self.steps)


Columns = list[list[F32]]
"""Per-token values that one role computes for another: ``columns[k][m]`` is [T], for micro-batch m of optimizer step k."""

Shard = list[list[PackedBatch]]
"""Micro-batches of one data-parallel rank: ``shard[k][m]`` is micro-batch m of optimizer step k."""


def split_equally[Item](items: Sequence[Item], ranks: int, filler: Item) -> list[list[Item]]:
    """Split ``items``, in order, into ``ranks`` lists of equal length, padded with ``filler``.

    Example: ``split_equally([1, 2, 3], 2, 0) == [[1, 2], [3, 0]]``.
    """
    num_per_rank = -(-len(items) // ranks)
    padded_items = [*items, *[filler] * (num_per_rank * ranks - len(items))]
    return [padded_items[rank * num_per_rank : (rank + 1) * num_per_rank] for rank in range(ranks)]


def shards(batch: TrainBatch, ranks: int) -> list[Shard]:
    """Return one shard for each of ``ranks`` data-parallel ranks, even if ``batch`` was assembled for another number of ranks."""
    steps = [
        split_equally([micro for rank in step.micro_batches for micro in rank], ranks, EMPTY_BATCH)
        for step in batch.steps
    ]
    return [[step[rank] for step in steps] for rank in range(ranks)]


def redistribute(columns: Sequence[Columns], batch: TrainBatch, ranks: int) -> list[Columns]:
    """Redistribute ``columns``, which the ranks of one role computed for ``batch``, over the ``ranks`` ranks of another role.

    Entry r of the argument and of the result contains the columns of data-parallel rank r. Micro-batches keep their order.
    """
    steps: list[list[list[F32]]] = []
    for k, step in enumerate(batch.steps):
        num_micro_batches = sum(len(rank) for rank in step.micro_batches)
        flat = [column for rank in columns for column in rank[k]][:num_micro_batches]
        steps.append(split_equally(flat, ranks, NO_TOKENS))
    return [[step[rank] for step in steps] for rank in range(ranks)]


NO_TOKENS = np.zeros(0, dtype=np.float32)
EMPTY_BATCH = PackedBatch(
    token_ids=np.zeros(0, dtype=np.int32),
    cu_seqlens=np.zeros(1, dtype=np.int32),
    loss_weight=NO_TOKENS,
    versions=np.zeros(0, dtype=np.int32),
    rollout_logprobs=NO_TOKENS,
    rewards=NO_TOKENS,
    advantages=None,
    sample_ids=np.zeros(0, dtype=np.int64),
)
"""Empty micro-batch for padding: every rank must run the same number of micro-batches."""
