"""Tiny random hybrid models: three gated delta net layers to one of attention, uneven shapes."""

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


def rope(family: str, rotated: float) -> dict[str, Any]:
    """The base of a family's trainer tests, which is no library's default."""
    return {"rope_type": "default", "rope_theta": THETA[family], "partial_rotary_factor": rotated}


FAMILIES: dict[str, dict[str, Any]] = {
    "qwen3_next": {**EXPERTS, "linear_num_value_heads": 4, "rope_parameters": rope("qwen3_next", 0.25)},
    "qwen3_5_text": {
        "linear_num_value_heads": 4,
        "tie_word_embeddings": True,
        "rope_parameters": rope("qwen3_5_text", 0.5),
    },
    "qwen3_5_moe_text": {
        **EXPERTS,
        "linear_num_value_heads": 6,  # a ratio for which SGLang has another path
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
    inner = f"{WITH_VISION}_text"
    rotary = {"rope_parameters": rope(inner, 0.5)}  # not what transformers writes beside it
    text = {**SHAPE, **FAMILIES[inner], **rotary, "rms_norm_eps": EPSILON[inner], "tie_word_embeddings": False}
    return AutoConfig.for_model(family, text_config=text, vision_config=VISION, tie_word_embeddings=False, **TOKENS)


def build(folder: Path, family: str) -> Models:
    """Models A and B of one shape, with norms, decays and biases that are not what they start as.

    The files of a vision model have the experts of a layer in two tensors, as those of released models.
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
    """Tensors as a trainer exports them, one per expert: transformers keeps those of a layer in one parameter."""

    def tensors(self, name: str) -> dict[str, torch.Tensor]:
        stored = by_expert(load_file(self.paths[name] / "model.safetensors"))
        return {key: tensor for key, tensor in stored.items() if ".visual." not in key}  # not trained, never sent
