"""Shapes of public models that recipes and docs name: the fields of their config.json, so that no file is needed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from slime_like.config.schema.family_entry import REFUSED_FAMILIES
from slime_like.errors import ConfigError
from slime_like.planner.config_json import read_shape, shape_of
from slime_like.planner.shapes import ModelShape
from slime_like.registry import nearest


def _qwen3(hidden: int, width: int, layers: int, heads: int, *, tied: bool, kv_heads: int = 8) -> dict[str, Any]:
    return {
        "model_type": "qwen3",
        "hidden_size": hidden,
        "intermediate_size": width,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": 128,
        "vocab_size": 151_936,
        "max_position_embeddings": 40_960,
        "tie_word_embeddings": tied,
    }


def _qwen3_moe(hidden: int, width: int, expert_width: int, layers: int, heads: int) -> dict[str, Any]:
    return {
        **_qwen3(hidden, width, layers, heads, tied=False, kv_heads=4),
        "model_type": "qwen3_moe",
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": expert_width,
        "decoder_sparse_step": 1,
    }


_DEEPSEEK = {
    "model_type": "deepseek_v3",
    "hidden_size": 7_168,
    "intermediate_size": 18_432,
    "moe_intermediate_size": 2_048,
    "num_hidden_layers": 61,
    "num_attention_heads": 128,
    "num_key_value_heads": 128,
    "q_lora_rank": 1_536,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "num_experts_per_tok": 8,
    "first_k_dense_replace": 3,
    "moe_layer_freq": 1,
    "vocab_size": 129_280,
    "max_position_embeddings": 163_840,
    "tie_word_embeddings": False,
}
_DEEPSEEK_V2 = {
    **_DEEPSEEK,
    "model_type": "deepseek_v2",
    "q_lora_rank": None,
    "hidden_size": 2_048,
    "intermediate_size": 10_944,
    "moe_intermediate_size": 1_408,
    "num_hidden_layers": 27,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "n_routed_experts": 64,
    "n_shared_experts": 2,
    "num_experts_per_tok": 6,
    "first_k_dense_replace": 1,
    "vocab_size": 102_400,
}
_GLM = {
    "model_type": "glm4_moe",
    "num_attention_heads": 96,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "attention_bias": True,
    "n_shared_experts": 1,
    "num_experts_per_tok": 8,
    "vocab_size": 151_552,
    "max_position_embeddings": 131_072,
    "tie_word_embeddings": False,
}
_GLM_355B = {
    **_GLM,
    "hidden_size": 5_120,
    "intermediate_size": 12_288,
    "moe_intermediate_size": 1_536,
    "num_hidden_layers": 92,
    "n_routed_experts": 160,
    "first_k_dense_replace": 3,
    "use_qk_norm": True,
}
_GLM_9B = {
    **_qwen3(4_096, 13_696, 40, 32, tied=False, kv_heads=2),
    "model_type": "glm4",
    "attention_bias": True,
    "vocab_size": 151_552,
    "max_position_embeddings": 32_768,
}
_MINIMAX = {
    "model_type": "minimax_m2",
    "hidden_size": 3_072,
    "intermediate_size": 1_536,
    "num_hidden_layers": 62,
    "num_attention_heads": 48,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "rotary_dim": 64,
    "num_local_experts": 256,
    "num_experts_per_tok": 8,
    "num_mtp_modules": 3,
    "vocab_size": 200_064,
    "max_position_embeddings": 196_608,
    "tie_word_embeddings": False,
}
MODELS: dict[str, dict[str, Any]] = {
    "Qwen3-0.6B": _qwen3(1_024, 3_072, 28, 16, tied=True),
    "Qwen3-1.7B": _qwen3(2_048, 6_144, 28, 16, tied=True),
    "Qwen3-4B": _qwen3(2_560, 9_728, 36, 32, tied=True),
    "Qwen3-8B": _qwen3(4_096, 12_288, 36, 32, tied=False),
    "Qwen3-14B": _qwen3(5_120, 17_408, 40, 40, tied=False),
    "Qwen3-32B": _qwen3(5_120, 25_600, 64, 64, tied=False),
    "Qwen3-30B-A3B": _qwen3_moe(2_048, 6_144, 768, 48, 32),
    "Qwen3-235B-A22B": _qwen3_moe(4_096, 12_288, 1_536, 94, 64),
    "Qwen3-Next-80B-A3B": {
        **_qwen3_moe(2_048, 5_120, 512, 48, 16),
        "model_type": "qwen3_next",
        "num_key_value_heads": 2,
        "head_dim": 256,
        "num_experts": 512,
        "num_experts_per_tok": 10,
        "shared_expert_intermediate_size": 512,
        "full_attention_interval": 4,
        "linear_num_key_heads": 16,
        "linear_num_value_heads": 32,
        "linear_key_head_dim": 128,
        "linear_value_head_dim": 128,
        "linear_conv_kernel_dim": 4,
        "max_position_embeddings": 262_144,
    },
    "Qwen3.5-0.8B": {
        "model_type": "qwen3_5",
        "tie_word_embeddings": True,
        "text_config": {
            "model_type": "qwen3_5_text",
            "hidden_size": 1_024,
            "intermediate_size": 3_584,
            "num_hidden_layers": 24,
            "num_attention_heads": 8,
            "num_key_value_heads": 2,
            "head_dim": 256,
            "full_attention_interval": 4,
            "linear_num_key_heads": 16,
            "linear_num_value_heads": 16,
            "linear_key_head_dim": 128,
            "linear_value_head_dim": 128,
            "linear_conv_kernel_dim": 4,
            "vocab_size": 248_320,
            "max_position_embeddings": 262_144,
        },
    },
    "Qwen3.5-35B-A3B": {
        "model_type": "qwen3_5_moe",
        "tie_word_embeddings": False,
        "text_config": {
            "model_type": "qwen3_5_moe_text",
            "hidden_size": 2_048,
            "moe_intermediate_size": 512,
            "shared_expert_intermediate_size": 512,
            "num_experts": 256,
            "num_experts_per_tok": 8,
            "num_hidden_layers": 40,
            "num_attention_heads": 16,
            "num_key_value_heads": 2,
            "head_dim": 256,
            "full_attention_interval": 4,
            "linear_num_key_heads": 16,
            "linear_num_value_heads": 32,
            "linear_key_head_dim": 128,
            "linear_value_head_dim": 128,
            "linear_conv_kernel_dim": 4,
            "vocab_size": 248_320,
            "max_position_embeddings": 262_144,
        },
    },
    "Qwen2.5-7B": {
        **_qwen3(3_584, 18_944, 28, 28, tied=False, kv_heads=4),
        "model_type": "qwen2",
        "vocab_size": 152_064,
        "max_position_embeddings": 32_768,
    },
    "Llama-3.1-8B": {
        **_qwen3(4_096, 14_336, 32, 32, tied=False),
        "model_type": "llama",
        "vocab_size": 128_256,
        "max_position_embeddings": 131_072,
    },
    "MiMo-7B": {
        **_qwen3(4_096, 11_008, 36, 32, tied=False),
        "model_type": "mimo",
        "attention_bias": True,
        "vocab_size": 151_680,
        "max_position_embeddings": 32_768,
        "num_nextn_predict_layers": 1,
    },
    "MiniMax-M2": _MINIMAX,
    "MiniMax-M2.1": _MINIMAX,
    "MiniMax-M2.5": _MINIMAX,
    "DeepSeek-R1": _DEEPSEEK,
    "DeepSeek-V3": _DEEPSEEK,
    "DeepSeek-V2": {
        **_DEEPSEEK_V2,
        "q_lora_rank": 1_536,
        "hidden_size": 5_120,
        "intermediate_size": 12_288,
        "moe_intermediate_size": 1_536,
        "num_hidden_layers": 60,
        "num_attention_heads": 128,
        "num_key_value_heads": 128,
        "n_routed_experts": 160,
    },
    "DeepSeek-V2-Lite": _DEEPSEEK_V2,
    "Moonlight-16B-A3B": {
        **_DEEPSEEK_V2,
        "model_type": "deepseek_v3",
        "intermediate_size": 11_264,
        "vocab_size": 163_840,
        "max_position_embeddings": 8_192,
    },
    "Kimi-K2": {
        **_DEEPSEEK,
        "model_type": "kimi_k2",
        "num_attention_heads": 64,
        "num_key_value_heads": 64,
        "n_routed_experts": 384,
        "first_k_dense_replace": 1,
        "vocab_size": 163_840,
        "max_position_embeddings": 131_072,
    },
    "GLM-4-9B-0414": _GLM_9B,
    "GLM-Z1-9B-0414": _GLM_9B,
    "GLM-4.5": _GLM_355B,
    "GLM-4.6": _GLM_355B,
    "GLM-4.7": _GLM_355B,
    "GLM-4.5-Air": {
        **_GLM,
        "hidden_size": 4_096,
        "intermediate_size": 10_944,
        "moe_intermediate_size": 1_408,
        "num_hidden_layers": 46,
        "n_routed_experts": 128,
        "first_k_dense_replace": 1,
    },
}
"""Name on Hugging Face, without the owner -> fields of config.json."""
REFUSED = {"DeepSeek-V3.2": "deepseek_v32", "GLM-4.7-Flash": "glm4_moe_lite", "GLM-5": "glm_moe_dsa"}
"""Start of the name of a public model that is not supported -> its model_type, which REFUSED_FAMILIES explains."""


def refused_type(name: str) -> str | None:
    """Return the model_type of an unsupported public model; None if the model is not in ``REFUSED``.

    The last part of ``name`` (a path or owner/name) has to begin with the model's name in ``REFUSED``.
    """
    last = Path(name).name.lower()
    return next((kind for model, kind in REFUSED.items() if last.startswith(model.lower())), None)


def table_config(name: str) -> dict[str, Any] | None:
    """Return the config.json fields of a public model; None if it is not in ``MODELS``.

    Only the last part of ``name``, a path or owner/name, counts. A name with a suffix such as ``-Instruct-2507`` has the shape
    of its base.
    """
    last = Path(name).name.lower()
    matches = [model for model in MODELS if last == model.lower() or last.startswith(f"{model.lower()}-")]
    return MODELS[max(matches, key=len)] if matches else None


def find_shape(flag: str, name: str) -> ModelShape:
    """Return the shape of the model in a folder with a config.json, or of a model in the planner's table.

    Raises ``ConfigError`` if ``name`` is neither, or a model that is not supported, and ``CheckpointError`` if the folder's
    config.json is missing or unusable. The error names ``flag``.
    """
    if Path(name).is_dir():
        return read_shape(flag, name)
    if kind := refused_type(name):
        raise ConfigError(f"{flag}={name!r} has model_type {kind!r}, which is not supported: {REFUSED_FAMILIES[kind]}")
    values = table_config(name)
    if values is None:
        raise ConfigError(
            f"{flag}={name!r} is neither a folder with a config.json nor a model of the planner's table: "
            f"{nearest(name, MODELS)}"
        )
    return shape_of(values, name)
