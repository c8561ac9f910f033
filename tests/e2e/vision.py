"""A text model as the language part of a vision model, with tensors that slime_like does not train."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

TOWER = {"depth": 1, "hidden_size": 32, "intermediate_size": 32, "num_heads": 2, "num_position_embeddings": 16}
UNTRAINED_PREFIXES = ("model.visual.", "mtp.")


def add_vision(text: Path, folder: Path) -> Path:
    """Write the Qwen3.5 of ``text`` with a random vision tower, and tensors for multi-token prediction, to ``folder``."""
    from transformers import Qwen3_5Config, Qwen3_5ForConditionalGeneration

    shutil.copytree(text, folder)
    fields: dict[str, Any] = json.loads((text / "config.json").read_text())
    tie_embeddings = fields["tie_word_embeddings"]
    config = Qwen3_5Config(
        text_config=fields,
        vision_config=TOWER | {"out_hidden_size": fields["hidden_size"]},
        tie_word_embeddings=tie_embeddings,
    )
    torch.manual_seed(0)
    model: Any = Qwen3_5ForConditionalGeneration(config)
    model.save_pretrained(folder)
    text_tensors = load_file(text / "model.safetensors")
    tensors = load_file(folder / "model.safetensors")
    tensors |= {name.replace("model.", "model.language_model.", 1): tensor for name, tensor in text_tensors.items()}
    tensors |= {"mtp.fc.weight": torch.randn(4, 6, dtype=torch.bfloat16)}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def untrained_tensors(folder: Path) -> dict[str, torch.Tensor]:
    """Return the tensors that training must not change."""
    tensors = {name: tensor for path in folder.glob("*.safetensors") for name, tensor in load_file(path).items()}
    return {name: tensor for name, tensor in tensors.items() if name.startswith(UNTRAINED_PREFIXES)}
