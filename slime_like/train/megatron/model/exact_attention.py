"""Core attention that is bitwise equal to the engine's, for ``run.deterministic=true`` on a CPU."""

from __future__ import annotations

import torch
from torch import Tensor

from slime_like.train.megatron.model.layers import PackedAttention, PackedRows
from slime_like.util import batch_invariant


class ExactAttention(PackedAttention):
    """Attention per sequence, computed as in the engine.

    The query heads of a KV head are folded into rows, and sums have a fixed order.
    """

    def _per_sequence(self, query: Tensor, key: Tensor, value: Tensor, packed: PackedRows) -> Tensor:
        lengths = packed.cu_seqlens_q.diff().tolist()
        parts = zip(*(x.split(lengths) for x in (query, key, value)), strict=True)
        return torch.cat([self._sequence(q, k, v) for q, k, v in parts])

    def _sequence(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Map query [t, heads, dim], key and value [t, groups, dim] to [t, heads, dim]."""
        length, heads, dim = query.shape
        groups = key.shape[1]
        folded = query.view(length, groups, heads // groups, dim).permute(1, 2, 0, 3).reshape(1, groups, -1, dim)
        visible = torch.ones(length, length, dtype=torch.bool, device=query.device).tril()
        out = batch_invariant.attention(
            folded,
            key.transpose(0, 1)[None],
            value.transpose(0, 1)[None],
            visible.repeat(heads // groups, 1)[None],
            self.scale or dim**-0.5,
        )
        return out.view(groups, heads // groups, length, dim).permute(2, 0, 1, 3).reshape(length, heads, dim)
