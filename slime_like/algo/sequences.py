"""Sums and means over whole sequences, spread back to tokens, for losses that speak of sequences.

Under context parallelism a rank holds a part of each sequence. A sum over a sequence is then a sum over the ranks of the
context parallel group, in the forward pass and, since each rank's loss depends on the other ranks' tokens, of the
gradient in the backward pass: ``reduce`` does both.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from slime_like.interfaces import Reduce


@dataclass(frozen=True, slots=True)
class PackedSequences:
    """``Sequences`` of one micro-batch: N of its tokens are on this rank, of S sequences in all."""

    index: Tensor  # I64 [N], sequence of each token
    trained: Tensor  # bool [N], tokens that count
    num_trained: Tensor  # F [S], tokens that count of the whole sequence, on whatever rank
    reduce: Reduce  # over the ranks that share the sequences; differentiable

    def sum(self, values: Tensor) -> Tensor:
        """[N] -> [S]: sum over each whole sequence's trained tokens. Every rank of the group must call it."""
        counted = torch.where(self.trained, values, torch.zeros_like(values))
        empty = torch.zeros(len(self.num_trained), dtype=values.dtype, device=values.device)
        return self.reduce.sum(empty.index_add(0, self.index, counted))

    def mean(self, values: Tensor) -> Tensor:
        """[N] -> [S]: mean over each whole sequence's trained tokens, 0 where there are none."""
        return self.sum(values) / self.num_trained.to(values.dtype).clamp(min=1)

    def spread(self, values: Tensor) -> Tensor:
        """[S] -> [N]: each token gets its sequence's value."""
        return values[self.index]
