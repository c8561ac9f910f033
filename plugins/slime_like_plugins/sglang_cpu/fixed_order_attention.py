"""Batched attention backend with sums in a fixed order. It imports SGLang's attention, so only ``init_backend`` imports it."""

from __future__ import annotations

from typing import Any

import torch
from sglang.srt.layers.attention.attention_registry import register_attention_backend
from torch import Tensor

from slime_like.util import batch_invariant
from slime_like_plugins.sglang_cpu.attention import BatchedAttention, LengthBucket, require_plain_layers
from slime_like_plugins.sglang_cpu.batch_invariant_hooks import EXACT_ATTENTION


class FixedOrderAttention(BatchedAttention):
    """Batched attention with sums in an order that does not depend on the batch."""

    def _attend(self, bucket: LengthBucket, q_bQHD: Tensor, keys: Tensor, values: Tensor, scale: float) -> Tensor:
        """Return attention [b, Q, H, D] of q [b, Q, H, D] to the KV pool [slots, K, D]."""
        b, q, heads, _ = q_bQHD.shape
        folded, k_bKLD, v_bKLD = self._folded(bucket, q_bQHD, keys, values)
        visible_bQL = bucket.visible_bQL
        if visible_bQL is None:
            visible_bQL = torch.ones(b, 1, bucket.slots_bL.shape[1], dtype=torch.bool)
        if q > 1:
            visible_bQL = visible_bQL.repeat(1, heads // keys.shape[1], 1)
        return self._unfolded(batch_invariant.attention(folded, k_bKLD, v_bKLD, visible_bQL, scale), q)


def register() -> None:
    """Register the backend with SGLang."""
    register_attention_backend(EXACT_ATTENTION)(create)


def create(runner: Any) -> FixedOrderAttention:
    """Return the backend for a model runner. Raises ``NotImplementedError`` if it does not support a layer of the model."""
    require_plain_layers(runner.model)
    return FixedOrderAttention(runner)
