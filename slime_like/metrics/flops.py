"""Floating-point operations (FLOPs) of a decoder, from its config.json.

FLOPs are counted as for model-FLOPs utilisation: two per multiply-add of the model's formulas. The count leaves out
recomputed, masked and padded values, and norms, activations and rotations, whose cost is linear in the width. In
causal attention, only the pairs of tokens that attend to each other count. In the gated delta rule, only the recurrence
counts: three matrix-vector products with the state per token, although chunked kernels do more work.
Source: Chowdhery et al., "PaLM", appendix B.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, cast

from slime_like.config.rules.hf import GDNShape, gdn_shape, num_experts, sparse_layers
from slime_like.config.schema.names import FAMILIES
from slime_like.planner.shapes import LatentAttention

GDN_EVERY = 4  # Qwen3-Next without layer_types in config.json: every fourth layer is attention


@dataclass(frozen=True, slots=True)
class DecoderShape:
    """Dimensions of a model whose FLOPs are counted. Widths are those of whole layers, not of a rank's shard."""

    hidden: int
    vocab: int
    attention_layers: int
    gdn_layers: int
    heads: int
    kv_heads: int
    head_dim: int
    output_gate: bool  # True: attention has an output gate
    gdn: GDNShape | None
    dense_layers: int  # layers with one MLP in place of experts
    mlp: int
    expert_layers: int
    experts: int
    active_experts: int
    expert_mlp: int
    shared_mlp: int  # 0: no shared expert
    shared_gate: bool
    latent: LatentAttention | None = None  # in all attention layers, in place of heads, kv_heads and head_dim


def decoder_shape(config: Mapping[str, Any]) -> DecoderShape:
    """Return the shape of the model that a config.json or its text_config describes. Raises ``KeyError`` on a missing key."""
    text = cast("Mapping[str, Any]", config.get("text_config") or config)
    layers, heads = int(text["num_hidden_layers"]), int(text["num_attention_heads"])
    gdn = gdn_shape(text)
    linear = _linear_layers(text, layers) if gdn is not None else 0
    experts = num_experts(text)
    dense = layers - len(sparse_layers(text))
    family = FAMILIES.get(str(text.get("model_type")))
    expert_mlp, shared_mlp = (
        int(text.get(k) or 0) for k in ("moe_intermediate_size", "shared_expert_intermediate_size")
    )
    if text.get("num_local_experts"):
        expert_mlp = expert_mlp or int(text["intermediate_size"])
    return DecoderShape(
        hidden=int(text["hidden_size"]),
        vocab=int(text["vocab_size"]),
        attention_layers=layers - linear,
        gdn_layers=linear,
        heads=heads,
        kv_heads=int(text.get("num_key_value_heads") or heads),
        head_dim=int(text.get("head_dim") or int(text["hidden_size"]) // heads),
        output_gate=family is not None and family.output_gate,
        gdn=gdn,
        dense_layers=dense,
        mlp=int(text.get("intermediate_size") or 0),
        expert_layers=layers - dense,
        experts=experts,
        active_experts=int(text.get("num_experts_per_tok") or 0),
        expert_mlp=expert_mlp,
        shared_mlp=shared_mlp or int(text.get("n_shared_experts") or 0) * expert_mlp,
        shared_gate=bool(shared_mlp),
        latent=_latent(text) if text.get("kv_lora_rank") else None,
    )


def forward_flops(shape: DecoderShape, lengths: Iterable[int], *, logits: bool = True) -> int:
    """Return the FLOPs of a forward pass over sequences of these lengths, with the output projection unless ``logits=False``."""
    sizes = list(lengths)
    tokens = sum(sizes)
    pairs = sum(length * (length + 1) // 2 for length in sizes)
    attention = tokens * _attention_projections(shape) + pairs * _pair_flops(shape)
    total = shape.attention_layers * attention
    total += shape.gdn_layers * tokens * gdn_token_flops(shape)
    total += tokens * (shape.dense_layers * 6 * shape.hidden * shape.mlp + shape.expert_layers * _experts(shape))
    return total + (tokens * 2 * shape.hidden * shape.vocab if logits else 0)


def train_flops(shape: DecoderShape, lengths: Iterable[int]) -> int:
    """Return the FLOPs of a forward and a backward pass; the latter counts as two forward passes."""
    return 3 * forward_flops(shape, lengths)


def gdn_token_flops(shape: DecoderShape) -> int:
    """Return the FLOPs per token of one Gated DeltaNet layer in a forward pass: projections, convolution, recurrence.

    Return 0 if the model has no such layer.
    """
    gdn = shape.gdn
    if gdn is None:
        return 0
    keys, values = gdn.key_heads * gdn.key_dim, gdn.value_heads * gdn.value_dim
    projection_size = 2 * keys + 2 * values + 2 * gdn.value_heads  # q, k; v, z; beta, alpha
    convolution_size = 2 * keys + values
    state = 6 * gdn.value_heads * gdn.key_dim * gdn.value_dim
    return 2 * shape.hidden * (projection_size + values) + 2 * gdn.conv_width * convolution_size + state


def _attention_projections(shape: DecoderShape) -> int:
    """Return the FLOPs per token of the projections of an attention layer."""
    if (m := shape.latent) is not None:
        query = m.heads * (m.nope_dim + m.rope_dim)
        queries = m.query_rank * (shape.hidden + query) if m.query_rank else shape.hidden * query
        keys = shape.hidden * (m.kv_rank + m.rope_dim) + m.kv_rank * m.heads * (m.nope_dim + m.value_dim)
        return 2 * (queries + keys + m.heads * m.value_dim * shape.hidden)
    queries = shape.heads * shape.head_dim
    gate = queries if shape.output_gate else 0
    return 2 * shape.hidden * (2 * queries + gate + 2 * shape.kv_heads * shape.head_dim)


def _pair_flops(shape: DecoderShape) -> int:
    """Return an attention layer's FLOPs per pair of query and key: the score, and the product of weight and value."""
    if (m := shape.latent) is not None:
        return 2 * m.heads * (m.nope_dim + m.rope_dim + m.value_dim)
    return 4 * shape.heads * shape.head_dim


def _experts(shape: DecoderShape) -> int:
    """Return the FLOPs per token of an expert layer: router, chosen experts, shared expert with its gate."""
    active_width = shape.active_experts * shape.expert_mlp + shape.shared_mlp
    return 2 * shape.hidden * (shape.experts + int(shape.shared_gate)) + 6 * shape.hidden * active_width


def _linear_layers(text: Mapping[str, Any], layers: int) -> int:
    """Return the number of Gated DeltaNet layers."""
    kinds = text.get("layer_types")
    if kinds:
        return list(kinds).count("linear_attention")
    attention_interval = int(text.get("full_attention_interval") or GDN_EVERY)
    return layers - layers // attention_interval


def _latent(text: Mapping[str, Any]) -> LatentAttention:
    return LatentAttention(
        heads=int(text["num_attention_heads"]),
        query_rank=int(text.get("q_lora_rank") or 0),
        kv_rank=int(text["kv_lora_rank"]),
        nope_dim=int(text["qk_nope_head_dim"]),
        rope_dim=int(text["qk_rope_head_dim"]),
        value_dim=int(text["v_head_dim"]),
    )
