"""Fused forward of a dense model, which replaces the forward of SGLang's modules.

All operations between matrix multiplications, except attention, are kernels (``kernels.py``) over reused memory. If C also
computes the multiplications, a decode step with enough rows per thread is one call (``decode.py``). Prefill uses torch's
attention and SGLang's logits processor. Unsupported batches go through SGLang's own forward.

Axes: B rows (decode: one per request; prefill: the tokens of all requests, packed), T hidden, H query heads, D head
dimension, V vocabulary.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from slime_like_plugins.sglang_cpu.attention import BatchedAttention
from slime_like_plugins.sglang_cpu.decode import DecodeStep
from slime_like_plugins.sglang_cpu.kernels import CKernels, Kernels
from slime_like_plugins.sglang_cpu.products import Products
from slime_like_plugins.sglang_cpu.structure import DecoderBlock, blocks, obstacle
from slime_like_plugins.sglang_cpu.workspace import Workspace


class FusedForward:
    """Fused forward of one model on one rank."""

    def __init__(self, model: Any, kernels: Kernels) -> None:
        self._model, self._kernels = model, kernels
        self._blocks = blocks(model)
        linears = [linear for b in self._blocks for linear in (b.qkv, b.out, b.gate_up, b.down)]
        c = kernels if isinstance(kernels, CKernels) and kernels.has_products else None
        if c is not None and c.threads < torch.get_num_threads():  # C has another OpenMP than torch, or none
            c = None
        self._product = Products(model, linears, model.lm_head, c)
        self._step = None if c is None else DecodeStep(model, self._blocks, self._product, c)
        attention = model.model.layers[0].self_attn
        self._rope = attention.rotary_emb
        self._heads, self._dim = attention.num_heads, attention.head_dim
        self._eps: float = model.model.norm.variance_epsilon
        self._table: Tensor | None = None  # SGLang's rotary table, copied in float32 to the next field
        self._cos_sin = torch.empty(0)
        first = self._blocks[0]
        (hidden, inner), (width, _) = first.out.weight.shape, first.gate_up.weight.shape
        # Widths: norm output, qkv, queries, gate and up, their product, projection.
        self._workspace = Workspace((hidden, len(first.qkv.weight), inner, width, width // 2, hidden))

    @property
    def packed_by(self) -> str:
        """Return the name of the library that packs the weights for multiplications; "" if none does."""
        return self._product.packed_by

    def handles(self, batch: Any, extra: tuple[Any, ...]) -> bool:
        """Return True for a plain decode or prefill batch on this plugin's attention backend.

        A batch is plain if its inputs are not embeddings, and every other argument of the forward (``extra``) is None or False.
        """
        from sglang.srt.model_executor.forward_batch_info import ForwardMode

        return (
            batch.forward_mode in (ForwardMode.DECODE, ForwardMode.EXTEND)
            and all(argument is None or argument is False for argument in extra)
            and batch.input_embeds is None
            and batch.replace_embeds is None
            and isinstance(attention_backend(), BatchedAttention)
        )

    def __call__(self, token_ids: Tensor, positions: Tensor, batch: Any) -> Any:
        """Return SGLang's output: the logits of each request's next token.

        If requested, it also has hidden states and log-probabilities of prompt tokens.
        """
        model = self._model
        if not batch.forward_mode.is_decode() or batch.capture_hidden_mode.need_capture():
            hidden_BT = self._hidden(token_ids, positions, batch)
            return model.logits_processor(token_ids, hidden_BT, model.lm_head, batch, None)
        from sglang.srt.layers.logits_processor import LogitsProcessorOutput

        if self._step is not None and self._step.supports(len(token_ids)):
            self._product.renew()
            x_BT = F.embedding(token_ids, model.model.embed_tokens.weight)
            logits_BV = self._step(x_BT, (self._angles(batch), positions), attention_backend(), batch)
        else:
            logits_BV = torch.mm(self._hidden(token_ids, positions, batch), model.lm_head.weight.t())
        return LogitsProcessorOutput(next_token_logits=logits_BV[:, : model.config.vocab_size].float())

    def _hidden(self, token_ids: Tensor, positions: Tensor, batch: Any) -> Tensor:
        """Return hidden states [B, T] after the last norm; store keys and values in the pool."""
        kernels, eps, backend, product = self._kernels, self._eps, attention_backend(), self._product
        product.renew()
        pool, slots = backend.token_to_kv_pool, batch.out_cache_loc
        x_BT = F.embedding(token_ids, self._model.model.embed_tokens.weight)
        size = len(x_BT)
        angles = self._angles(batch), positions
        assert slots.dtype is positions.dtype is torch.int64
        assert slots.is_contiguous() and positions.is_contiguous() and len(slots) == len(positions) == size
        normed, qkv, q, gate_up, activated, delta = self._workspace(size, x_BT.dtype)
        q = q.view(size, self._heads, self._dim)
        pending_delta: Tensor | None = None
        for block in self._blocks:
            layer = block.attention.layer_id
            kernels.add_rms_norm(x_BT, pending_delta, block.attention_norm.weight, normed, eps)
            qkv = product(normed, block.qkv, qkv)
            pools = pool.get_key_buffer(layer), pool.get_value_buffer(layer)
            kernels.rope_and_store(qkv, head_norms(block), angles, slots, pools, q, eps)
            attention_output = backend.attend(q, pools, block.attention.scaling, batch)
            delta = product(attention_output.view(size, -1), block.out, delta)
            kernels.add_rms_norm(x_BT, delta, block.mlp_norm.weight, normed, eps)
            kernels.silu_mul(product(normed, block.gate_up, gate_up), activated)
            pending_delta = delta = product(activated, block.down, delta)
        out_BT = torch.empty_like(x_BT)
        kernels.add_rms_norm(x_BT, pending_delta, self._model.model.norm.weight, out_BT, eps)
        return out_BT

    def _angles(self, batch: Any) -> Tensor:
        """Return the rotary table in float32; it covers every position of the batch."""
        if self._table is not self._rope.cos_sin_cache:  # SGLang replaces it when it grows
            self._table = self._rope.cos_sin_cache
            self._cos_sin = self._rope.cos_sin_cache.float().contiguous()
        lens = batch.seq_lens if batch.seq_lens_cpu is None else batch.seq_lens_cpu
        max_len = int(lens.max())
        assert max_len <= len(self._cos_sin), f"position {max_len} is beyond the rotary table of {len(self._cos_sin)}"
        return self._cos_sin


def head_norms(block: DecoderBlock) -> tuple[Tensor, Tensor] | None:
    """Return the weights of the query and key norms; None if the model has none."""
    return None if block.q_norm is None or block.k_norm is None else (block.q_norm.weight, block.k_norm.weight)


def attention_backend() -> Any:
    """Return the attention backend of the current forward."""
    from sglang.srt.model_executor.forward_context import get_forward_context

    return get_forward_context().attn_backend


def bind(model: Any, kernels: Kernels | None) -> str:
    """Replace ``model``'s forward with the fused one for supported batches, if there are ``kernels`` and no ``obstacle``.

    Return a description of the forward in use.
    """
    if kernels is None:
        return f"module by module for {type(model).__name__}"
    reason = obstacle(model)
    if reason is not None:
        return f"module by module, as {reason}"
    fused, original = FusedForward(model, kernels), model.forward

    @functools.wraps(original)  # SGLang reads the signature
    def forward(input_ids: Tensor, positions: Tensor, forward_batch: Any, *args: Any, **kwargs: Any) -> Any:
        if not fused.handles(forward_batch, (*args, *kwargs.values())):
            return original(input_ids, positions, forward_batch, *args, **kwargs)
        with torch.no_grad():
            return fused(input_ids, positions, forward_batch)

    model.forward = forward
    packed = f", products packed by {fused.packed_by}" if fused.packed_by else ""
    return f"fused forward of {type(model).__name__}{packed}"
