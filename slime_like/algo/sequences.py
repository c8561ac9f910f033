"""Sums and means over sequences, and their expansion to tokens, for sequence-level losses.

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
    """``Sequences`` of one micro-batch with S sequences, N of whose tokens are on this rank."""

    index: Tensor  # I64 [N], sequence index of each token
    trained: Tensor  # bool [N], trained tokens
    num_trained: Tensor  # F [S], trained tokens of each sequence over all ranks
    reduce: Reduce  # over the ranks that share the sequences; differentiable

    def sum(self, values: Tensor) -> Tensor:
        """Return [S]: sum over the trained tokens of each sequence. Collective over the group's ranks."""
        trained_N = torch.where(self.trained, values, torch.zeros_like(values))
        zeros_S = torch.zeros(len(self.num_trained), dtype=values.dtype, device=values.device)
        return self.reduce.sum(zeros_S.index_add(0, self.index, trained_N))

    def mean(self, values: Tensor) -> Tensor:
        """Return [S]: mean over the trained tokens of each sequence, 0 without any. Collective."""
        return self.sum(values) / self.num_trained.to(values.dtype).clamp(min=1)

    def spread(self, values: Tensor) -> Tensor:
        """Return [N]: the value [S] of each token's sequence."""
        return values[self.index]
