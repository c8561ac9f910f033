"""Layer modules in plain torch for CPU and GPU, used in megatron's layers through ModuleSpec."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
from megatron.core.models.backends import LocalSpecProvider
from megatron.core.models.hybrid.hybrid_block import HybridStack, HybridStackSubmodules
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.ssm.mlp_layer import MLPLayer
from megatron.core.tensor_parallel import (
    ColumnParallelLinear,
    RowParallelLinear,
    gather_from_sequence_parallel_region,
)
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.attention import SelfAttention, SelfAttentionSubmodules
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.mlp import MLP, MLPSubmodules
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_layer import TransformerLayer, TransformerLayerSubmodules
from torch import Tensor

from slime_like.errors import ConfigError
from slime_like.train.megatron.model import sdpa
from slime_like.train.megatron.model.grouped_mlp import GroupedMLP
from slime_like.train.megatron.model.latent import latent_attention
from slime_like.train.megatron.model.layout import AttentionPieces
from slime_like.train.megatron.model.moe import moe_builder
from slime_like.train.megatron.model.norms import NormedOutput, NormedQKV, RMSNorm
from slime_like.train.megatron.model.vocab import VocabScores, vocab_scores


@dataclass
class PackedRows(PackedSeqParams):
    """megatron's packed-sequence parameters with sequence bounds on the host, so that no kernel launch waits for the GPU.

    ``cu_seqlens_q`` and ``cu_seqlens_kv`` are host tensors over the P padded tokens of all context parallel ranks.
    ``pieces`` divides this rank's attention into pieces; ``query_cu``, ``key_cu`` and ``key_index`` are the arrays of
    ``pieces`` on the device.
    """

    pieces: AttentionPieces | None = None
    query_cu: Tensor | None = None
    key_cu: Tensor | None = None
    key_index: Tensor | None = None
    sequence_cu: Tensor | None = None  # I32, a copy of ``cu_seqlens_q`` on the device
    position_ids: Tensor | None = None  # [P], of the padded tokens of all context parallel ranks
    by_rank: Tensor | None = None  # I64 [P], padded tokens ordered by rank; cp > 1
    in_order: Tensor | None = None  # I64 [P], the inverse of ``by_rank``
    padding: Tensor | None = None  # [1, L], with sequence parallelism [1, L / tp]; True if not counted by routers
    cos_sin: Tensor | None = None  # F32 [P, dim], cache of ``cos_sin_of``
    attention_batches: sdpa.AttentionBatches | None = None  # cache of ``batches``

    @property
    def batches(self) -> sdpa.AttentionBatches | None:
        """The packed sequences, in batches for kernels that need equal lengths; None with context parallelism.

        Computed at the first use, because variable-length kernels on a GPU do not need it.
        """
        if self.attention_batches is None and self.by_rank is None and self.query_cu is not None:
            bounds: Any = self.cu_seqlens_q
            self.attention_batches = sdpa.attention_batches(bounds.numpy(), self.query_cu.device)
        return self.attention_batches

    def cos_sin_of(self, angles: Tensor) -> Tensor:
        """Return F32 [P, dim]: the cosines of the first dim / 2 rotary ``angles`` [P, 1, 1, dim], then their sines.

        Only the first call computes them: all layers have the same angles.
        """
        if self.cos_sin is None:
            half = angles[:, 0, 0, : angles.shape[-1] // 2]
            self.cos_sin = torch.cat((half.cos(), half.sin()), -1)
        return self.cos_sin

    def on_device(self) -> PackedSeqParams:
        """Return packed-sequence parameters for TransformerEngine: on the device, for the sequences of all cp ranks.

        The bounds of a sequence include its padding. This changes no output: padding follows the tokens, and a causal
        query never sees later ones.
        """
        bounds = self.sequence_cu
        padded_bounds = (
            None if self.key_index is None else bounds
        )  # TransformerEngine reads these under context parallelism
        return PackedSeqParams(
            qkv_format="thd",
            cu_seqlens_q=bounds,  # pyright: ignore[reportArgumentType]
            cu_seqlens_kv=bounds,  # pyright: ignore[reportArgumentType]
            cu_seqlens_q_padded=padded_bounds,  # pyright: ignore[reportArgumentType]
            cu_seqlens_kv_padded=padded_bounds,  # pyright: ignore[reportArgumentType]
            max_seqlen_q=self.max_seqlen_q,
            max_seqlen_kv=self.max_seqlen_kv,
            pad_between_seqs=False,  # otherwise TransformerEngine compares bounds and waits for the GPU
        )


def refuse_dropout(config: TransformerConfig, attention_dropout: float | None) -> None:
    """Raise ``ConfigError`` if attention has dropout."""
    if (config.attention_dropout if attention_dropout is None else attention_dropout) > 0:
        raise ConfigError(
            "model.megatron.attention_dropout must be 0: trainer and engine must compute the same function"
        )


class PackedAttention(MegatronModule):
    """Causal grouped-query attention over packed sequences, which context parallelism may split.

    16-bit attention on a GPU runs one variable-length flash kernel for all sequences. Otherwise, scaled dot product
    attention runs per batch of sequences of similar length or, with context parallelism, per piece of ``AttentionPieces``.
    No scores between tokens of different sequences are computed.

    Context parallelism gathers keys and values over its ranks, as in Llama 3 (https://arxiv.org/abs/2407.21783, 3.3.2),
    in one collective per layer, and the backward pass scatters the summed gradients. With grouped queries there are few key
    heads to gather. Each rank reads only the gathered keys that its queries can see.
    """

    def __init__(
        self,
        config: TransformerConfig,
        layer_number: int,
        attn_mask_type: AttnMaskType,
        attention_type: str,
        attention_dropout: float | None = None,
        softmax_scale: float | None = None,
        pg_collection: Any = None,
        **_: Any,
    ) -> None:
        super().__init__(config=config)
        assert attn_mask_type == AttnMaskType.causal, f"{attn_mask_type} attention over packed sequences"
        refuse_dropout(config, attention_dropout)
        self.scale = softmax_scale
        self.cp_group = pg_collection.cp

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None = None,
        attn_mask_type: AttnMaskType | None = None,
        attention_bias: Tensor | None = None,
        packed_seq_params: PackedSeqParams | None = None,
    ) -> Tensor:
        """Map query [L, heads, dim], key and value [L, groups, dim] of the local tokens to [L, heads * dim].

        Collective over the context parallel ranks.
        """
        assert isinstance(packed_seq_params, PackedRows) and attention_mask is None and attention_bias is None
        if packed_seq_params.key_index is not None:
            key, value = self._gather(key, value, packed_seq_params.key_index)
        flash = query.is_cuda and query.dtype in (torch.bfloat16, torch.float16)
        attend = self._varlen if flash else self._per_sequence
        return attend(query, key, value, packed_seq_params).flatten(1)

    def _varlen(self, query: Tensor, key: Tensor, value: Tensor, packed: PackedRows) -> Tensor:
        from torch.nn.attention.varlen import varlen_attn

        assert packed.pieces is not None and packed.query_cu is not None and packed.key_cu is not None
        max_lengths = [max(lengths) for lengths in zip(*packed.pieces.lengths, strict=True)]
        out = varlen_attn(  # causality is aligned at the ends of queries and keys, as in flash attention 2.1
            query,
            key,
            value,
            packed.query_cu,
            packed.key_cu,
            *max_lengths,
            scale=self.scale,
            window_size=(-1, 0),
            enable_gqa=True,
        )
        assert isinstance(out, Tensor)
        return out

    def _per_sequence(self, query: Tensor, key: Tensor, value: Tensor, packed: PackedRows) -> Tensor:
        is_float64 = query.dtype == torch.float64  # under ``float64_layers``
        dtype = query.dtype if is_float64 else self.config.params_dtype  # 16-bit queries may be passed in float32
        # On a CPU torch's bfloat16 attention takes 2.5 times as long and rounds more often.
        if query.dtype == torch.bfloat16 and not query.is_cuda:
            query, key, value = query.float(), key.float(), value.float()
        if packed.batches is not None:
            return sdpa.in_batches(query, key, value, packed.batches, self.scale).to(dtype)
        assert packed.pieces is not None
        return sdpa.in_pieces(query, key, value, packed.pieces.lengths, self.scale).to(dtype)

    def _gather(self, key: Tensor, value: Tensor, key_index: Tensor) -> tuple[Tensor, Tensor]:
        """Gather the keys and values [L, groups, dim] of all ranks; return those that this rank reads, [K, groups, dim] each.

        Collective over the context parallel ranks.
        """
        local = torch.cat((key.flatten(1), value.flatten(1)), 1)
        gathered: Tensor = gather_from_sequence_parallel_region(local, group=self.cp_group)
        keys, values = gathered[key_index].split((key[0].numel(), value[0].numel()), 1)
        return keys.unflatten(1, key.shape[1:]), values.unflatten(1, value.shape[1:])


class Stack(HybridStack):
    """HybridStack whose final norm is ``norm``, not TransformerEngine's."""

    norm = RMSNorm

    def __init__(
        self,
        config: TransformerConfig,
        submodules: HybridStackSubmodules,
        post_process: bool = True,
        post_layer_norm: bool = True,
        **kwargs: Any,
    ) -> None:
        super().__init__(config, submodules, post_process=post_process, post_layer_norm=False, **kwargs)
        if post_process and post_layer_norm:
            self.post_layer_norm = True
            self.final_norm = self.norm(config, config.hidden_size, config.layernorm_epsilon)


class TorchParts(LocalSpecProvider):
    """Provider of modules in plain torch for megatron's spec builders."""

    def core_attention(self) -> type:
        return PackedAttention

    def layer_norm(self, rms_norm: bool = False, for_qk: bool = False, has_residual: bool = False) -> type:
        return RMSNorm


@dataclass(frozen=True, slots=True)
class LayerParts:
    """Modules of the hybrid stack's layers, chosen for the model and the device."""

    core_attention: type = PackedAttention
    mixers: Mapping[str, ModuleSpec] = field(default_factory=dict[str, ModuleSpec])  # by layer symbol, from plugins
    norm: type[RMSNorm] = RMSNorm
    self_attention: type[SelfAttention] = SelfAttention
    mlp: type[MLP] = MLP
    experts: type[GroupedMLP] = GroupedMLP  # with moe_grouped_gemm
    stack: type[Stack] = Stack
    scores: VocabScores = vocab_scores


MIXER_FIELDS = {"G": "gdn_layer"}
"""Layer symbol -> field of megatron's ``HybridStackSubmodules``."""


def stack_spec(
    config: TransformerConfig,
    parts: LayerParts,
    rotary_scale: float,
    *,
    output_norms: bool = False,
    projection_norms: bool = False,
) -> ModuleSpec:
    """Return the spec of the hybrid stack: token mixers, MLPs and experts, each with its norm and residual.

    ``rotary_scale`` multiplies the cosines and sines of the rotary angles in latent attention. With ``output_norms``, a norm
    follows attention and the dense MLP. With ``projection_norms``, the norms of queries and keys are over all heads. Neither is
    implemented for latent attention, nor ``output_norms`` for experts.
    """
    assert not (config.multi_latent_attention and (output_norms or projection_norms)), (
        "latent attention without these norms"
    )
    assert config.num_moe_experts is None or not output_norms, "experts without output norms"
    residual: Any = get_bias_dropout_add  # megatron annotates a function as a type
    output: Any = partial(NormedOutput, norm=parts.norm) if output_norms else RowParallelLinear

    def mixer(attention: ModuleSpec) -> ModuleSpec:
        submodules = TransformerLayerSubmodules(
            input_layernorm=parts.norm, self_attention=attention, self_attn_bda=residual
        )
        return ModuleSpec(TransformerLayer, submodules=submodules)

    def after_norm(mlp: Any) -> ModuleSpec:
        submodules = TransformerLayerSubmodules(pre_mlp_layernorm=parts.norm, mlp=mlp, mlp_bda=residual)
        return ModuleSpec(MLPLayer, submodules=submodules)

    if config.multi_latent_attention:
        attention = {"mla_layer": mixer(latent_attention(parts.core_attention, parts.norm, rotary_scale))}
    else:
        assert rotary_scale == 1.0, f"attention without latents has no rotary scale {rotary_scale}"
        attention = {"attention_layer": mixer(_attention(config, parts, output, projection_norms=projection_norms))}
    sparse = (
        {}
        if config.num_moe_experts is None
        else {"moe_layer": after_norm(moe_builder(config, TorchParts(), parts.experts))}
    )
    linears = MLPSubmodules(linear_fc1=ColumnParallelLinear, linear_fc2=output)
    return ModuleSpec(
        parts.stack,
        submodules=HybridStackSubmodules(
            mlp_layer=after_norm(partial(parts.mlp.as_mlp_submodule, submodules=linears)),
            **attention,
            **sparse,
            **{MIXER_FIELDS[symbol]: spec for symbol, spec in parts.mixers.items()},
        ),
    )


def _attention(config: TransformerConfig, parts: LayerParts, output: Any, *, projection_norms: bool) -> ModuleSpec:
    """Return the spec of grouped-query attention. ``output`` is the class or the builder of its output projection."""
    return ModuleSpec(
        parts.self_attention,
        params={"attn_mask_type": AttnMaskType.causal},
        submodules=SelfAttentionSubmodules(
            linear_qkv=NormedQKV if projection_norms else ColumnParallelLinear,
            core_attention=parts.core_attention,
            linear_proj=output,
            q_layernorm=parts.norm if config.qk_layernorm else None,
            k_layernorm=parts.norm if config.qk_layernorm else None,
        ),
    )
