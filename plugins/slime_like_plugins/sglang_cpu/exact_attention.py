"""Batched attention backend with sums in a fixed order; imported in a worker with its model runner."""

from __future__ import annotations

import torch
from sglang.srt.layers.attention.attention_registry import register_attention_backend
from torch import Tensor

from slime_like.util import exact
from slime_like_plugins.sglang_cpu.attention import BatchedAttention, LengthBucket
from slime_like_plugins.sglang_cpu.exact import EXACT_ATTENTION


class ExactDecodeAttention(BatchedAttention):
    """Batched attention with sums in a fixed order."""

    def _attend(self, bucket: LengthBucket, q_bQHD: Tensor, keys: Tensor, values: Tensor, scale: float) -> Tensor:
        """Return attention [b, Q, H, D] of q [b, Q, H, D] to the KV pool [slots, K, D]."""
        b, q, heads, dim = q_bQHD.shape
        kv_heads = keys.shape[1]
        group = heads // kv_heads
        folded = q_bQHD.view(b, q, kv_heads, group, dim).permute(0, 2, 3, 1, 4).reshape(b, kv_heads, group * q, dim)
        visible_bQL = bucket.visible_bQL
        if visible_bQL is None:
            visible_bQL = torch.ones(b, 1, bucket.slots_bL.shape[1], dtype=torch.bool)
        if q > 1:
            visible_bQL = visible_bQL.repeat(1, group, 1)
        k_bLKD, v_bLKD = self._gathered(bucket, keys, values)
        out = exact.attention(folded, k_bLKD.transpose(1, 2), v_bLKD.transpose(1, 2), visible_bQL, scale)
        return out.view(b, kv_heads, group, q, dim).permute(0, 3, 1, 2, 4).reshape(b, q, heads, dim)


def register() -> None:
    """Register the backend with SGLang."""
    register_attention_backend(EXACT_ATTENTION)(ExactDecodeAttention)
