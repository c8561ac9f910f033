"""Layer parts that run on the C kernels, with the parameters and checkpoint keys of the torch parts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch.nn.functional as F
from megatron.core.transformer.attention import SelfAttention
from megatron.core.transformer.mlp import MLP
from torch import Tensor

from slime_like.errors import ConfigError
from slime_like.train.megatron.model.grouped_mlp import GroupedMLP
from slime_like.train.megatron.model.layers import LayerParts, PackedAttention, PackedRows, Stack
from slime_like.train.megatron.model.norms import RMSNorm
from slime_like.train.megatron.platform.collective import wait_for_weights
from slime_like_plugins.megatron_cpu.experts import ExpertLinearFunction, expert_kernels
from slime_like_plugins.megatron_cpu.functions import (
    AttentionFunction,
    RMSNormFunction,
    SplitRotateFunction,
    SwiGLUFunction,
)
from slime_like_plugins.megatron_cpu.kernels import LANES, SUFFIX, QkvHeads, kernels
from slime_like_plugins.megatron_cpu.scores import fused_vocab_scores
from slime_like_plugins.sglang_cpu.build import BuildError

MAX_LENGTH = 1024  # maximum tokens per sequence; up to this length the kernels were measured at 1.5 times torch's speed


class FusedRMSNorm(RMSNorm):
    """RMS norm with one pass in forward and one in backward.

    Zero-centred norms, unsupported dtypes, and inputs of another dtype than the weight run on torch.
    """

    def forward(self, x: Tensor) -> Tensor:
        """Return the normalised ``x``, in the shape [..., hidden] of ``x``."""
        if self.zero_centered or x.dtype not in SUFFIX or self.weight.dtype is not x.dtype:
            return super().forward(x)
        return RMSNormFunction.apply(x, self.weight, self.eps, kernels())  # pyright: ignore[reportReturnType]


class FusedStack(Stack):
    """Decoder whose final norm is fused."""

    norm = FusedRMSNorm


class FusedMLP(MLP):
    """MLP whose SwiGLU makes one pass over memory, except for dtypes that the kernels do not support."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        config = self.config
        is_plain = config.activation_func_clamp_value is None and config.glu_linear_offset == 0.0
        assert config.gated_linear_unit and config.activation_func is F.silu and is_plain, "the MLP is not SwiGLU"

    def forward(self, hidden_states: Tensor, per_token_scale: Tensor | None = None, **kwargs: Any) -> Any:
        """Return the output [L, 1, H] for ``hidden_states`` [L, 1, H], and the bias of the second linear layer."""
        assert per_token_scale is None, "a dense MLP has no scale per token"
        first: Any = self.linear_fc1
        second: Any = self.linear_fc2
        gate_up, bias = first(hidden_states)
        gate_up = gate_up if bias is None else gate_up + bias
        if gate_up.dtype in SUFFIX:
            return second(SwiGLUFunction.apply(gate_up, None, kernels()))
        gate, up = gate_up.chunk(2, -1)
        return second(F.silu(gate) * up)


class FusedGroupedMLP(GroupedMLP):
    """Grouped experts with weighted SwiGLU in one pass, and with matrix multiplications in C.

    Torch computes dtypes and shapes that the kernels do not support, and multiplies where it is faster: on CPUs without AVX-512,
    or for bfloat16 without the BF16 instructions of AVX-512.
    """

    def product(self, rows_RI: Tensor, counts: Sequence[int], weights: Sequence[Tensor]) -> Tensor:
        if not expert_kernels().multiplies(rows_RI, weights[0]):
            return super().product(rows_RI, counts, weights)
        out: Any = ExpertLinearFunction.apply(rows_RI.contiguous(), tuple(counts), expert_kernels(), *weights)
        return out

    def activate(self, gate_up: Tensor, probs_R: Tensor) -> Tensor:
        if gate_up.dtype not in SUFFIX:
            return super().activate(gate_up, probs_R)
        out: Any = SwiGLUFunction.apply(gate_up, probs_R.float(), kernels())
        return out


class FusedCoreAttention(PackedAttention):
    """Attention in C for micro-batches whose sequences all fit into a core's cache (``MAX_LENGTH``).

    Micro-batches with a longer sequence, context parallelism, and unsupported head sizes or dtypes run on torch.
    """

    def _per_sequence(self, query: Tensor, key: Tensor, value: Tensor, packed: PackedRows) -> Tensor:
        is_short = packed.batches is not None and packed.max_seqlen_q <= MAX_LENGTH
        if not is_short or query.shape[-1] % LANES or query.dtype not in SUFFIX:
            return super()._per_sequence(query, key, value, packed)
        qkv = (query.float(), key.float(), value.float())
        scale = query.shape[-1] ** -0.5 if self.scale is None else self.scale
        out: Any = AttentionFunction.apply(*qkv, packed.sequence_cu, scale, self.config.params_dtype, kernels())
        return out


class FusedAttention(SelfAttention):
    """Attention with split, norms, rotation and cast of queries, keys and values in one pass.

    This pass is replaced by Megatron's own steps in these cases: context parallelism, a KV head shared by tensor parallel
    ranks, output gates, zero-centred norms, no rotation, or a rotation of part of a head or of neighbouring channels.
    """

    _cos_sin: Tensor | None = None

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Any,
        *args: Any,
        rotary_pos_emb: Any = None,
        packed_seq_params: Any = None,
        **kwargs: Any,
    ) -> Any:
        """Run megatron's forward. If the fused pass is possible, ``get_query_key_value_tensors`` rotates queries and keys."""
        if isinstance(packed_seq_params, PackedRows) and self._fits(packed_seq_params, rotary_pos_emb):
            self._cos_sin = packed_seq_params.cos_sin_of(rotary_pos_emb)
            rotary_pos_emb = None
        try:
            return super().forward(
                hidden_states,
                attention_mask,
                *args,
                rotary_pos_emb=rotary_pos_emb,
                packed_seq_params=packed_seq_params,
                **kwargs,
            )
        finally:
            self._cos_sin = None

    def _fits(self, packed: PackedRows, angles: Any) -> bool:
        config = self.config
        rotates_whole_heads = isinstance(angles, Tensor) and angles.shape[-1] == self.hidden_size_per_attention_head
        variants = (config.attention_output_gate, config.layernorm_zero_centered_gamma, config.rotary_interleaved)
        is_plain = not any(variants)
        return rotates_whole_heads and is_plain and packed.key_index is None and self._query_groups() >= self.world_size

    def _query_groups(self) -> int:
        return self.config.num_query_groups or self.config.num_attention_heads

    def get_query_key_value_tensors(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        """Return queries [L, 1, heads, dim], keys and values [L, 1, groups, dim], and with ``output_gate`` the gates.

        If the fused pass is possible, all are float32, and queries and keys are already rotated.
        """
        if self._cos_sin is None:
            return super().get_query_key_value_tensors(hidden_states, *args, **kwargs)
        qkv, _ = self.linear_qkv(hidden_states)
        groups = self.num_query_groups_per_partition
        queries = self.num_attention_heads_per_partition // groups
        weights = (_weight(self.q_layernorm), _weight(self.k_layernorm))
        heads = QkvHeads(groups, queries, self.hidden_size_per_attention_head)
        eps, rows = self.config.layernorm_epsilon, qkv.flatten(0, 1)
        out: Any = SplitRotateFunction.apply(rows, *weights, self._cos_sin, heads, eps, kernels())
        return tuple(x[:, None] for x in out)


def _weight(norm: Any) -> Tensor | None:
    if norm is None:
        return None
    wait_for_weights(norm)
    return norm.weight


def with_c_kernels(parts: LayerParts) -> LayerParts:
    """Return ``parts`` on the C kernels, which are compiled unless they are cached.

    Raises ``ConfigError`` if they cannot be compiled or loaded. A core attention other than ``PackedAttention`` is kept.
    """
    try:
        kernels()
    except (BuildError, OSError) as error:
        raise ConfigError(f"model.cpu_kernels=c: {error}; to train with torch, set model.cpu_kernels=auto") from error
    core = FusedCoreAttention if parts.core_attention is PackedAttention else parts.core_attention
    return replace(
        parts,
        core_attention=core,
        norm=FusedRMSNorm,
        self_attention=FusedAttention,
        mlp=FusedMLP,
        experts=FusedGroupedMLP,
        stack=FusedStack,
        scores=fused_vocab_scores,
    )
