"""Tiny random models with latent attention: with and without query latents, YaRN, expert groups and expert biases."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from tests.engine.conftest import VOCAB, Models
from tests.engine.hybrid_models import HybridModels
from tests.train.models import EPSILON, EXTRA, ROPE, THETA, add_code, randomise_constants, rename_to_kimi

SHAPE: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,  # the first one without experts
    "num_attention_heads": 4,
    "max_position_embeddings": 512,
    "initializer_range": 0.05,
    "eos_token_id": 1,
    "bos_token_id": None,
    "tie_word_embeddings": False,
}
KIMI, UNSCALED = "kimi_k2", "deepseek_v2 greedy"  # the second one without YaRN
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "deepseek_v2": ("deepseek_v2", EXTRA["deepseek_v2"]),
    UNSCALED: ("deepseek_v2", EXTRA["deepseek_v2"] | {"topk_method": "greedy"}),
    "deepseek_v3": ("deepseek_v3", EXTRA["deepseek_v3"]),
    KIMI: ("deepseek_v3", EXTRA["deepseek_v3"] | {"n_group": 1, "topk_group": 1}),
}
"""Name -> model_type in transformers, and keys of the config."""


def config(name: str, **changes: Any) -> Any:
    """Return the config of a model; ``changes`` replace keys."""
    from transformers import AutoConfig

    family, extra = FAMILIES[name]
    yarn = ROPE["yarn"] | {"original_max_position_embeddings": 32}  # SGLang's table has factor * 32 = 512 positions
    rope = {**(ROPE["default"] if name == UNSCALED else yarn), "rope_theta": THETA[family]}
    fields = {**SHAPE, **extra, "rope_parameters": rope, "rms_norm_eps": EPSILON[family], **changes}
    return AutoConfig.for_model(family, **fields)


def build(folder: Path, name: str, **changes: Any) -> Models:
    """Write models A and B of one shape, with norms and expert biases changed from their initial values."""
    from transformers import AutoModelForCausalLM

    hf: dict[str, Any] = {}
    for seed, model_name in enumerate("AB"):
        torch.manual_seed(seed)
        model: Any = AutoModelForCausalLM.from_config(config(name, **changes))
        randomise_constants(model)
        model.eval().save_pretrained(folder / model_name)
        if name == KIMI:
            add_code(rename_to_kimi(folder / model_name))
        hf[model_name] = model
    return HybridModels({model_name: folder / model_name for model_name in hf}, hf)
