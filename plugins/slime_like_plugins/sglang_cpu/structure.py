"""Check that the fused forward supports a model and its parallel layout; other models keep SGLang's forward."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from slime_like.config.schema.names import FAMILIES

MODELS = tuple(entry.fused_engine_model for entry in FAMILIES.values() if entry.fused_engine_model)
DTYPES = (torch.float32, torch.bfloat16)


@dataclass(frozen=True, slots=True)
class DecoderBlock:
    """Modules of one layer. Each forward reads their current weights, which weight pushes overwrite in place."""

    attention_norm: Any
    qkv: Any
    q_norm: Any | None
    k_norm: Any | None
    out: Any
    mlp_norm: Any
    gate_up: Any
    down: Any
    attention: Any


def blocks(model: Any) -> list[DecoderBlock]:
    """Return the layers of a model whose class is one of ``MODELS``."""
    layers: list[DecoderBlock] = []
    for layer in model.model.layers:
        attention, mlp = layer.self_attn, layer.mlp
        norms = getattr(attention, "q_norm", None), getattr(attention, "k_norm", None)
        block = DecoderBlock(
            layer.input_layernorm,
            attention.qkv_proj,
            *norms,
            attention.o_proj,
            layer.post_attention_layernorm,
            mlp.gate_up_proj,
            mlp.down_proj,
            attention.attn,
        )
        layers.append(block)
    return layers


def obstacle(model: Any) -> str | None:
    """Return the first property of ``model`` or its parallel layout that rules out the fused forward; None if there is none."""
    from sglang.srt.runtime_context import get_parallel

    name = type(model).__name__
    if name not in MODELS:
        return f"{name} is not one of {', '.join(MODELS)}"
    parallel = get_parallel()
    for size in ("tp_size", "pp_size", "attn_dp_size", "attn_cp_size"):
        if getattr(parallel, size) != 1:
            return f"{size} is {getattr(parallel, size)}"
    return next(_differences(model), None)


def _differences(model: Any) -> Iterator[str]:
    layers = blocks(model)
    dtypes = {parameter.dtype for parameter in model.parameters()}
    if len(dtypes) != 1 or not dtypes <= set(DTYPES):
        yield f"parameters are {', '.join(sorted(map(str, dtypes)))}"
    if model.quant_config is not None:
        yield "the model is quantized"
    for layer, block in zip(model.model.layers, layers, strict=True):
        yield from _rope_differences(layer.self_attn)
        yield from _attention_differences(block.attention, layer.self_attn)
        for linear in (block.qkv, block.out, block.gate_up, block.down):
            if type(getattr(linear, "quant_method", None)).__name__ != "UnquantizedLinearMethod":
                yield f"{type(linear).__name__} is not a plain linear layer"
            if not linear.weight.is_contiguous() or getattr(linear, "skip_bias_add", False):
                yield f"{type(linear).__name__} has another layout"
        if type(layer.mlp.act_fn).__name__ != "SiluAndMul":
            yield f"activation {type(layer.mlp.act_fn).__name__}"
        if (block.q_norm is None) != (block.k_norm is None):
            yield "only one of queries and keys is normed"
    yield from _norm_differences([n for b in layers for n in (b.attention_norm, b.mlp_norm, b.q_norm, b.k_norm) if n])
    yield from _norm_differences([layers[0].attention_norm, model.model.norm])
    if model.capture_aux_hidden_states or model.model.layers_to_capture:
        yield "hidden states of layers are captured"
    yield from _head_differences(model)


def _norm_differences(norms: list[Any]) -> Iterator[str]:
    for norm in norms:
        plain = type(norm).__name__ == "RMSNorm" and norm.has_weight and norm.variance_size_override is None
        if not plain or norm.cast_x_before_out_mul or norm.fp32_residual or norm.override_orig_dtype is not None:
            yield f"{type(norm).__name__} with options"
        elif norm.variance_epsilon != norms[0].variance_epsilon:
            yield "norms differ in epsilon"


def _rope_differences(attention: Any) -> Iterator[str]:
    from sglang.srt.layers.rotary_embedding.base import RotaryEmbedding

    rope = attention.rotary_emb
    inherited = isinstance(rope, RotaryEmbedding) and all(
        getattr(type(rope), name) is getattr(RotaryEmbedding, name) for name in ("forward", "forward_native")
    )
    if not inherited:
        yield f"rotary embedding {type(rope).__name__}"
    elif not rope.is_neox_style or not rope.rotary_dim == rope.head_size == attention.head_dim:
        yield "rotary embedding of part of the head, or of pairs"
    elif rope.cos_sin_cache.shape[1] != attention.head_dim or attention.head_dim % 2:
        yield "rotary table with another width"


def _attention_differences(radix: Any, attention: Any) -> Iterator[str]:
    windowed = radix.sliding_window_size is not None and radix.sliding_window_size > -1
    if windowed or radix.is_cross_attention or radix.logit_cap or radix.use_irope or radix.xai_temperature_len > 0:
        yield "attention that is not plain and causal"
    if radix.qk_head_dim != attention.head_dim or radix.v_head_dim != attention.head_dim:
        yield "heads of unequal width"
    if radix.tp_q_head_num != attention.num_heads or radix.tp_k_head_num != attention.num_kv_heads:
        yield "heads counted in two ways"
    if radix.k_scale is not None or radix.v_scale is not None:
        yield "a scaled KV cache"


def _head_differences(model: Any) -> Iterator[str]:
    head, processor = model.lm_head, model.logits_processor
    if type(processor).__name__ != "LogitsProcessor" or type(head).__name__ not in (
        "ParallelLMHead",
        "VocabParallelEmbedding",
    ):
        yield f"{type(head).__name__} through {type(processor).__name__}"
    elif getattr(head, "bias", None) is not None or type(head.quant_method).__name__ != "UnquantizedEmbeddingMethod":
        yield "a head with bias or quantization"
    options = ("logit_scale", "final_logit_softcapping", "rl_on_policy_target")
    switches = ("use_fp32_lm_head", "use_fp32_lm_head_output", "keep_last_hidden_states", "return_full_logits")
    enabled_options = [name for name in options if getattr(processor, name) is not None]
    enabled_options += [name for name in (*switches, "do_tensor_parallel_all_gather") if getattr(processor, name)]
    if enabled_options:
        yield f"logits with {', '.join(enabled_options)}"
