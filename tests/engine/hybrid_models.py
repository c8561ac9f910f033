"""Tiny hybrid models with random weights: three Gated DeltaNet layers and one attention layer, with uneven sizes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from tests.engine.conftest import VOCAB, Models
from tests.train.models import EPSILON, THETA, fuse_experts, rewrite
from tests.train.parity import by_expert

SHAPE: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 24,
    "max_position_embeddings": 512,
    "initializer_range": 0.08,
    "eos_token_id": 1,
    "bos_token_id": None,
}
EXPERTS: dict[str, Any] = {
    "num_experts": 6,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 20,
    "shared_expert_intermediate_size": 28,
}


def rope(family: str, rotary_fraction: float) -> dict[str, Any]:
    """Return rope parameters with the base of the family's trainer tests, which is not a default of any library."""
    return {"rope_type": "default", "rope_theta": THETA[family], "partial_rotary_factor": rotary_fraction}


FAMILIES: dict[str, dict[str, Any]] = {
    "qwen3_next": {**EXPERTS, "linear_num_value_heads": 4, "rope_parameters": rope("qwen3_next", 0.25)},
    "qwen3_5_text": {
        "linear_num_value_heads": 4,
        "tie_word_embeddings": True,
        "rope_parameters": rope("qwen3_5_text", 0.5),
    },
    "qwen3_5_moe_text": {
        **EXPERTS,
        "linear_num_value_heads": 6,  # SGLang has a separate code path for this ratio
        "rope_parameters": rope("qwen3_5_moe_text", 0.25),
    },
}

VISION = {
    "depth": 1,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_heads": 2,
    "out_hidden_size": 48,
    "num_position_embeddings": 16,
    "patch_size": 4,
    "deepstack_visual_indexes": [],
}
TOKENS = {
    f"{name}_token_id": VOCAB - 1 - index for index, name in enumerate(("image", "video", "vision_start", "vision_end"))
}


WITH_VISION = "qwen3_5_moe"


def config(family: str) -> Any:
    """Return the config of a text model, or of a vision model around one."""
    from transformers import AutoConfig

    if family != WITH_VISION:
        return AutoConfig.for_model(family, **SHAPE, **FAMILIES[family], rms_norm_eps=EPSILON[family])
    text_family = f"{WITH_VISION}_text"
    rotary = {
        "rope_parameters": rope(text_family, 0.5)
    }  # differs from the value that transformers writes at the top level
    text = {
        **SHAPE,
        **FAMILIES[text_family],
        **rotary,
        "rms_norm_eps": EPSILON[text_family],
        "tie_word_embeddings": False,
    }
    return AutoConfig.for_model(family, text_config=text, vision_config=VISION, tie_word_embeddings=False, **TOKENS)


def build(folder: Path, family: str) -> Models:
    """Write models A and B of one shape, with norms, decays and biases changed from their initial values.

    The files of a vision model have the experts of a layer in two tensors, as in released models.
    """
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

    auto = AutoModelForImageTextToText if family == WITH_VISION else AutoModelForCausalLM

    hf: dict[str, Any] = {}
    for seed, name in enumerate("AB"):
        torch.manual_seed(seed)
        model: Any = auto.from_config(config(family))
        with torch.no_grad():
            for key, parameter in model.named_parameters():
                if parameter.ndim == 1:
                    parameter.add_(0.3 * torch.randn_like(parameter))
                if key.endswith("conv1d.weight"):
                    parameter.mul_(2)
        model.eval().save_pretrained(folder / name)
        if family == WITH_VISION:
            rewrite(folder / name, fuse_experts)
        hf[name] = model
    return HybridModels({name: folder / name for name in hf}, hf)


class HybridModels(Models):
    """Models whose tensors are exported per expert, as a trainer does; transformers has one parameter per layer."""

    def tensors(self, name: str) -> dict[str, torch.Tensor]:
        tensors = by_expert(load_file(self.paths[name] / "model.safetensors"))
        carried = (".visual.", ".mtp_layers.")  # not trained, so never sent
        return {key: tensor for key, tensor in tensors.items() if not any(part in key for part in carried)}
