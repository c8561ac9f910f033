"""Rules for fields of SGLang (rollout.sglang.*) and megatron-core (model.megatron.*), checked without importing either.

``upstream/*.json`` lists the fields of SGLang's ``ServerArgs`` and Megatron's ``TransformerConfig`` with type and default;
``scripts/dump_upstream_keys.py`` generates them from the installed packages.
"""

from __future__ import annotations

import ast
import functools
import json
import math
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NotRequired, TypedDict, cast

from slime_like.errors import ConfigError
from slime_like.registry import closest

FOLDER = Path(__file__).parent / "upstream"
SGLANG = "sglang_server_args"
MEGATRON = "megatron_transformer_config"
ROOTS = {"rollout.sglang": SGLANG, "model.megatron": MEGATRON}

SHAPE = "config.json of model.hf_checkpoint"
ALL_TOKENS = "every token reaches its experts, as in the engine"
TE_EXPERTS = "experts run on plain torch here, not on TransformerEngine's kernels"
OWNED: dict[str, dict[str, str]] = {
    SGLANG: {
        "model_path": "model.hf_checkpoint",
        "tokenizer_path": "model.hf_checkpoint",
        "dtype": "model.dtype",
        "device": "placement.device",
        "tp_size": "rollout.tp",
        "dcp_size": "rollout.dcp",
        "dcp_comm_backend": "rollout.dcp_comm",
        "dcp_replicate_q_proj": "rollout.dcp_replicate_q",
        "enable_symm_mem": "rollout.symmetric_memory",
        "attn_dp_size": "rollout.dp_attention",
        "dp_size": "rollout.num_engines (rollout.dp_attention splits the attention within one engine)",
        "context_length": "rollout.max_context_len",
        "max_running_requests": "rollout.max_running_requests",
        "random_seed": "run.seed",
        "host": "the run itself (loopback)",
        "port": "the run itself (a free port)",
        "admin_api_key": "the run itself (random per run)",
        "api_key": "the run itself (random per run)",
        "base_gpu_id": "the placement",
        "nnodes": "rollout.engine_num_nodes",
        "node_rank": "the placement",
        "dist_init_addr": "the placement",
        "weight_version": "the weight sync",
        "trust_remote_code": "the run itself (False: code in a model folder is never run)",
        "skip_tokenizer_init": "the rollout (token ids in, token ids out)",
    },
    MEGATRON: {
        "tensor_model_parallel_size": "parallel.tp",
        "pipeline_model_parallel_size": "parallel.pp",
        "context_parallel_size": "parallel.cp",
        "virtual_pipeline_model_parallel_size": "parallel.vpp",
        "num_layers_in_first_pipeline_stage": "parallel.first_stage_layers",
        "num_layers_in_last_pipeline_stage": "parallel.last_stage_layers",
        "pipeline_model_parallel_layout": "parallel.pipeline_layout",
        "expert_model_parallel_size": "parallel.ep",
        "sequence_parallel": "parallel.sequence_parallel",
        "bf16": "model.dtype",
        "fp16": "model.dtype",
        "recompute_granularity": "model.recompute",
        "recompute_method": "model.recompute_method",
        "recompute_num_layers": "model.recompute_num_layers",
        "recompute_modules": "model.recompute_modules",
        "calculate_per_token_loss": "algo.aggregation",
        "use_cpu_initialization": "placement.device",
        "variable_seq_lengths": "the packed batches",
        "is_hybrid_model": "the trainer",
        "attention_dropout": "the model family (no dropout)",
        "hidden_dropout": "the model family (no dropout)",
        "num_layers": SHAPE,
        "hidden_size": SHAPE,
        "ffn_hidden_size": SHAPE,
        "num_attention_heads": SHAPE,
        "num_query_groups": SHAPE,
        "kv_channels": SHAPE,
        "layernorm_epsilon": SHAPE,
        "normalization": SHAPE,
        "gated_linear_unit": SHAPE,
        "add_bias_linear": SHAPE,
        "add_qkv_bias": SHAPE,
        "qk_layernorm": SHAPE,
        "multi_latent_attention": SHAPE,
        "rotary_interleaved": SHAPE,
        "num_moe_experts": SHAPE,
        "moe_router_topk": SHAPE,
        "moe_ffn_hidden_size": SHAPE,
        "moe_layer_freq": SHAPE,
        "moe_router_score_function": SHAPE,
        "moe_router_pre_softmax": SHAPE,
        "moe_router_topk_scaling_factor": SHAPE,
        "moe_router_num_groups": SHAPE,
        "moe_router_group_topk": SHAPE,
        "moe_router_enable_expert_bias": SHAPE,
        "moe_shared_expert_intermediate_size": SHAPE,
        "moe_shared_expert_gate": SHAPE,
        "moe_token_dropping": ALL_TOKENS,
        "moe_expert_capacity_factor": ALL_TOKENS,
        "moe_pad_expert_input_to_capacity": ALL_TOKENS,
        "moe_input_jitter_eps": ALL_TOKENS,
        "moe_router_force_load_balancing": ALL_TOKENS,
        "moe_router_force_biased": ALL_TOKENS,
        "moe_router_load_balancing_type": "the trainer (aux_loss, weighted by model.megatron.moe_aux_loss_coeff)",
        "moe_permute_fusion": TE_EXPERTS,
        "moe_router_fusion": TE_EXPERTS,
        "expert_tensor_parallel_size": "parallel.etp",
    },
}
"""Fields that this project sets: field -> the key or component that sets it."""


class UpstreamKey(TypedDict):
    """Field of another project. ``type`` (its annotation) and ``default`` (None if there is none) are source text.

    ``flags`` are its command-line flags, except the one derived from its name.
    """

    type: str
    default: str | None
    flags: NotRequired[list[str]]


@functools.cache
def table(name: str) -> Mapping[str, UpstreamKey]:
    """Return the table ``name``, ``SGLANG`` or ``MEGATRON``: a dict from field names to ``UpstreamKey``."""
    return cast("dict[str, UpstreamKey]", json.loads((FOLDER / f"{name}.json").read_text())["keys"])


@functools.cache
def source(name: str) -> str:
    """Return the distribution and version that a table was generated from, such as ``sglang 0.5.23``."""
    return str(json.loads((FOLDER / f"{name}.json").read_text())["source"])


def check_foreign(root: str, values: Mapping[str, Any]) -> None:
    """Raise ``ConfigError`` on a key below ``root`` that is unknown or set by this project (``OWNED``), or on a wrong type."""
    name = ROOTS[root]
    fields = table(name)
    for key, value in values.items():
        dotted = f"{root}.{key}={value!r}"
        if key not in fields or key.startswith("_"):
            close = closest(key, fields)
            hint = f"did you mean {close!r}?" if close else "no field has a similar name"
            raise ConfigError(f"{dotted}: {source(name)} has no such field: {hint}")
        if key in OWNED[name]:
            raise ConfigError(describe_owner(dotted, OWNED[name][key], "this key"))
        annotation = fields[key]["type"]
        if not settable(annotation):
            raise ConfigError(
                f"{dotted}: {source(name)} expects a Python object ({annotation}), which a config cannot contain: remove {dotted}"
            )
        if not accepts(annotation, value):
            raise ConfigError(
                f"{dotted} does not fit {source(name)}: expected {annotation}, default {fields[key]['default']}"
            )


def describe_owner(setting: str, owner: str, removable: str) -> str:
    """Return the error message for ``setting``, which sets a field listed in ``OWNED``. ``owner`` is its entry in ``OWNED``.

    ``removable`` names the setting that the message asks the user to remove, such as "this key".
    """
    if owner in (ALL_TOKENS, TE_EXPERTS):
        return f"{setting} cannot be set: {owner}; remove {removable}"
    return f"{setting} belongs to {owner}: remove {removable}, and set it there"


def settable(annotation: str) -> bool:
    """Return whether a config can contain a value other than null that fits ``annotation``.

    This is tried with a few values: booleans, numbers, strings, lists and mappings. An annotation with a Literal passes.
    """
    samples: list[Any] = [True, 1, 0.5, "auto", [1, 1], [0.5], ["a"], {}, [{}]]
    return "Literal" in annotation or any(accepts(annotation, sample) for sample in samples)


def accepts(annotation: str, value: Any) -> bool:
    """Return whether ``value`` fits a type annotation in source form, such as ``Optional[List[int]]``.

    Only booleans, numbers, strings, lists, mappings and None can fit. A list also fits a set, sequence or tuple with annotated
    elements. No value fits any other class.
    """
    return _accepts(ast.parse(annotation, mode="eval").body, value)


def _accepts(node: ast.expr, value: Any) -> bool:
    match node:
        case ast.Name(id="Any"):
            return not isinstance(value, float) or math.isfinite(value)
        case ast.Name(id="bool"):
            return isinstance(value, bool)
        case ast.Name(id="int"):
            return isinstance(value, int) and not isinstance(value, bool)
        case ast.Name(id="float"):
            return isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) <= sys.float_info.max
        case ast.Name(id="str"):
            return isinstance(value, str)
        case ast.Name(id="list" | "List"):
            return isinstance(value, list)
        case ast.Name(id="dict" | "Dict"):
            return isinstance(value, dict)
        case ast.Constant(value=None):
            return value is None
        case ast.BinOp(left=left, op=ast.BitOr(), right=right):
            return _accepts(left, value) or _accepts(right, value)
        case ast.Subscript(value=ast.Name(id=name), slice=inner):
            return _accepts_generic(name, inner.elts if isinstance(inner, ast.Tuple) else [inner], value)
        case _:
            return False


def _accepts_generic(name: str, arguments: list[ast.expr], value: Any) -> bool:
    match name:
        case "Optional":
            return value is None or _accepts(arguments[0], value)
        case "Union":
            return any(_accepts(argument, value) for argument in arguments)
        case "Literal":
            return any(isinstance(a, ast.Constant) and a.value == value for a in arguments)
        case "list" | "List" | "set" | "Sequence":
            return isinstance(value, list) and all(_accepts(arguments[0], item) for item in cast("list[Any]", value))
        case "tuple" | "Tuple":
            items = cast("list[Any]", value) if isinstance(value, list) else []
            return len(items) == len(arguments) and all(map(_accepts, arguments, items))
        case "dict" | "Dict":
            return isinstance(value, dict) and all(
                _accepts(arguments[-1], item) for item in cast("dict[str, Any]", value).values()
            )
        case _:
            return False
