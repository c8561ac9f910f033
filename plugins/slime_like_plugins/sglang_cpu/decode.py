"""A decode step of a dense model as one call into C: every thread computes all layers for its rows.

Separate kernels would each be a parallel region: a small model would spend most of its time waiting for other threads, which
fall asleep between regions.

Axes: B requests, T hidden, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from slime_like_plugins.sglang_cpu.kernels import CKernels
from slime_like_plugins.sglang_cpu.products import Products
from slime_like_plugins.sglang_cpu.structure import DecoderBlock
from slime_like_plugins.sglang_cpu.workspace import Workspace

CACHED_BYTES = 1 << 21  # weights up to this size fit into a core's private cache
MIN_ROWS_PER_THREAD = 4  # for larger weights, because each thread reads all of them


class DecodeStep:
    """Decode step through the layers, final norm and head of a model whose layers all have the same shapes."""

    def __init__(self, model: Any, blocks: Sequence[DecoderBlock], product: Products, kernels: CKernels) -> None:
        self._model, self._blocks, self._product, self._c = model, blocks, product, kernels
        attention = model.model.layers[0].self_attn
        self._heads, self._kv_heads, self._dim = attention.num_heads, attention.num_kv_heads, attention.head_dim
        hidden, inner = blocks[0].out.weight.shape
        self._width = blocks[0].down.weight.shape[1]
        # Widths: norm output, qkv, queries, attention output, gate and up, their product, projection.
        widths = (hidden, len(blocks[0].qkv.weight), inner, inner, 2 * self._width, self._width, hidden)
        self._workspace = Workspace(widths)
        self._eps: float = model.model.norm.variance_epsilon
        self._scale: float = blocks[0].attention.scaling
        self._is_supported = product.packed_by == kernels.name and len({_shape(block) for block in blocks}) == 1
        self._min_rows_per_thread = 1 if product.bytes <= CACHED_BYTES else MIN_ROWS_PER_THREAD
        self._pointers: list[int] = []  # addresses in ``_layers``
        self._layers = torch.empty(0, dtype=torch.int64)

    def supports(self, rows: int) -> bool:
        """Return True if the model is supported and there are enough rows for all threads."""
        return self._is_supported and rows >= self._min_rows_per_thread * self._c.threads

    def __call__(self, x_BT: Tensor, angles: tuple[Tensor, Tensor], backend: Any, batch: Any) -> Tensor:
        """Return the logits [B, V] of embedded tokens ``x_BT``, which is overwritten; store keys and values in the pool."""
        rows, dtype = len(x_BT), x_BT.dtype
        cos_sin, positions_B = angles
        table, slots_B = backend.req_to_token_pool.req_to_token, batch.out_cache_loc
        rows_B, lens_B = batch.req_pool_indices, batch.seq_lens
        assert table.dtype is torch.int32 and table.stride(1) == 1
        for column in (positions_B, slots_B, rows_B, lens_B):
            assert column.dtype is torch.int64 and column.is_contiguous() and len(column) == rows
        scores, scores_per_thread = self._c.scores(table)
        head, norm = self._model.lm_head, self._model.model.norm.weight
        assert norm.dtype is dtype and x_BT.is_contiguous()
        logits_BV = torch.empty(rows, len(head.weight), dtype=dtype)
        inputs = (norm, self._product.packed(head), cos_sin, positions_B, slots_B, rows_B, lens_B, table, x_BT)
        pointers = (*inputs, *self._workspace(rows, dtype), logits_BV, scores)
        sizes = (table.stride(0), scores_per_thread, x_BT.shape[1], self._heads, self._kv_heads, self._dim, self._width)
        step = (*(tensor.data_ptr() for tensor in pointers), *sizes, logits_BV.shape[1])
        self._c.decode(dtype, self._table(backend.token_to_kv_pool, dtype), step, rows, self._scale, self._eps)
        return logits_BV

    def _table(self, pool: Any, dtype: torch.dtype) -> Tensor:
        """Return the addresses of each layer's tensors [layers, 14], laid out as in ``csrc/step.h``; rebuilt if one changed."""
        pointers: list[int] = []
        for block in self._blocks:
            layer = block.attention.layer_id
            keys, values = pool.get_key_buffer(layer), pool.get_value_buffer(layer)
            assert keys.dtype is values.dtype is dtype, f"the model is {dtype}, the KV pool {keys.dtype}"
            assert keys.is_contiguous() and values.is_contiguous()
            assert keys.shape[1:] == values.shape[1:] == (self._kv_heads, self._dim), "the KV pool has another layout"
            tensors = (
                *(block.attention_norm.weight, *self._linear(block.qkv), _weight(block.q_norm), _weight(block.k_norm)),
                *(*self._linear(block.out), block.mlp_norm.weight),
                *(*self._linear(block.gate_up), *self._linear(block.down), keys, values),
            )
            pointers += [0 if tensor is None else tensor.data_ptr() for tensor in tensors]
        if pointers != self._pointers:
            self._pointers = pointers
            self._layers = torch.tensor(pointers, dtype=torch.int64).view(len(self._blocks), -1)
        return self._layers

    def _linear(self, linear: Any) -> tuple[Tensor, Tensor | None]:
        return self._product.packed(linear), getattr(linear, "bias", None)


def _shape(block: DecoderBlock) -> tuple[object, ...]:
    """Return the properties that C assumes to be equal in all layers."""
    linears = (block.qkv, block.out, block.gate_up, block.down)
    return (block.attention.scaling, *(tuple(linear.weight.shape) for linear in linears))


def _weight(norm: Any | None) -> Tensor | None:
    return None if norm is None else norm.weight
