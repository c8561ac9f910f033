"""megatron's TransformerConfig, derived from slime_like's config and the HF config."""

from __future__ import annotations

import dataclasses
import itertools
import warnings
from typing import TYPE_CHECKING, Any

import torch

from slime_like.config.rules.pipeline import even_segments
from slime_like.config.schema.names import FAMILIES
from slime_like.config.schema.resolved import Layout, RankSpec
from slime_like.errors import ConfigError
from slime_like.registry import nearest
from slime_like.train.megatron.families.base import Family, family_class

if TYPE_CHECKING:
    from megatron.core.transformer import TransformerConfig

# Fused kernels of TransformerEngine and apex, which are not dependencies.
_UNFUSED = {
    "persist_layer_norm": False,
    "bias_activation_fusion": False,
    "bias_dropout_fusion": False,
    "masked_softmax_fusion": False,
    "gradient_accumulation_fusion": False,
    "apply_rope_fusion": False,
    "cross_entropy_loss_fusion": False,
}


def dtype_of(spec: RankSpec) -> torch.dtype:
    """Return the compute dtype."""
    return {"float32": torch.float32, "bfloat16": torch.bfloat16}[spec.dtype]


def choose_family(spec: RankSpec, hf: Any) -> Family:
    """Return the family named by ``model.family`` or, if that is ``auto``, by the HF config's model_type.

    Raises ``ConfigError`` if there is no such family, or if it does not support the HF config or the tensor parallel size.
    """
    name: str = hf.model_type if spec.model.family == "auto" else spec.model.family
    if name not in FAMILIES:
        raise ConfigError(
            f"{spec.model_key}={spec.model.hf_checkpoint}: model_type {name!r} has no family; {nearest(name, FAMILIES)}"
        )
    return family_class(name)(hf, spec.layout.tp)


def transformer_config(spec: RankSpec, family: Family) -> TransformerConfig:
    """Return the TransformerConfig of one rank.

    Raises ``ConfigError`` on a key of ``model.megatron`` that is not a field of the TransformerConfig or that the trainer
    sets itself, e.g. from ``parallel``, and on values that megatron-core rejects.
    """
    from megatron.core.transformer import MLATransformerConfig, TransformerConfig

    layout, dtype, fields = spec.layout, dtype_of(spec), family.transformer_fields()
    kind = MLATransformerConfig if fields.get("multi_latent_attention") else TransformerConfig
    derived_fields: dict[str, Any] = {
        **fields,
        "num_layers": sum(len(block) for block in family.blocks()),
        "is_hybrid_model": True,
        "tensor_model_parallel_size": layout.tp,
        "pipeline_model_parallel_size": layout.pp,
        "virtual_pipeline_model_parallel_size": layout.vpp if layout.vpp > 1 else None,
        "context_parallel_size": layout.cp,
        "expert_model_parallel_size": layout.ep,
        "expert_tensor_parallel_size": layout.etp,
        "sequence_parallel": layout.sequence_parallel and layout.tp > 1,
        "params_dtype": dtype,
        "pipeline_dtype": dtype,
        "bf16": dtype == torch.bfloat16,
        "calculate_per_token_loss": True,  # divide gradients by the number of tokens of the optimizer step
        "variable_seq_lengths": layout.pp > 1,  # packed rows differ in length
        "deterministic_mode": spec.deterministic,
    }
    default_fields: dict[str, Any] = {
        "moe_token_dispatcher_type": "alltoall",  # the default rejects rows of different lengths, even without experts
        "moe_grouped_gemm": family.num_experts > 0,  # by ``GroupedMLP``; megatron's class needs TransformerEngine
        "moe_router_dtype": "fp32",
        "moe_router_bias_update_rate": 0.0,  # an expert bias is not trained, but can be updated to balance the load
        # With virtual stages on two ranks, one batch of sends and receives would pair opposite directions (see ``patches``).
        "batch_p2p_comm": spec.device == "cuda" and layout.vpp == 1,
        "perform_initialization": False,  # every weight is loaded
        **_UNFUSED,
        **_recompute(spec, family),
    }
    names = {field.name for field in dataclasses.fields(kind)}
    for key, value in spec.model.megatron.items():
        if key not in names:
            raise ConfigError(
                f"model.megatron.{key} is not a field of megatron-core's TransformerConfig: {nearest(key, names)}"
            )
        if key in derived_fields:
            raise ConfigError(
                f"model.megatron.{key}={value!r}: this field is derived from config.json, parallel.* or model.dtype "
                f"and is {derived_fields[key]!r}; remove model.megatron.{key}"
            )
    try:
        with warnings.catch_warnings():  # megatron warns about defaults of its CUDA graph fields
            warnings.filterwarnings("ignore", message="full scope is deprecated")
            return kind(**{**derived_fields, **default_fields, **spec.model.megatron})
    except (ValueError, AssertionError, TypeError) as error:
        raise ConfigError(
            f"megatron-core rejects the values of parallel.* or model.megatron.*: {error}; change the keys that this message names"
        ) from error


def _recompute(spec: RankSpec, family: Family) -> dict[str, Any]:
    match spec.model.recompute:
        case "full":
            per_block = len(family.blocks()[0])  # a decoder block is several layers of the hybrid stack
            return {
                "recompute_granularity": "full",
                "recompute_method": spec.model.recompute_method,
                "recompute_num_layers": per_block * (spec.model.recompute_num_layers or 1),
            }
        case "selective":
            return {"recompute_granularity": "selective", "recompute_modules": list(spec.model.recompute_modules)}
        case _:
            return {}


def pipeline_pattern(blocks: tuple[str, ...], layout: Layout) -> str:
    """Return the layer symbols with ``|`` between pipeline segments.

    Raises ``ConfigError`` if the segments do not fit ``blocks``.
    """
    sizes = layout.segments or even_segments(len(blocks), layout.pp, layout.vpp)
    if sum(sizes) != len(blocks) or len(sizes) != layout.pp * layout.vpp:
        raise ConfigError(
            f"pipeline segments of {' + '.join(map(str, sizes))} layers for parallel.pp={layout.pp} * parallel.vpp="
            f"{layout.vpp} do not fit a model of {len(blocks)} layers: use models with the same number of layers, or an even split"
        )
    edges = [sum(sizes[:segment]) for segment in range(len(sizes) + 1)]
    return "|".join("".join(blocks[a:b]) for a, b in itertools.pairwise(edges))
