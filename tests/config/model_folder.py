"""Tiny Hugging Face model folder: real headers and JSON, weights of zeros."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

SHAPE: dict[str, Any] = {
    "model_type": "qwen3",
    "num_hidden_layers": 4,
    "hidden_size": 64,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "vocab_size": 128,
    "max_position_embeddings": 2048,
}


def write_safetensors(path: Path, tensors: dict[str, tuple[int, ...]]) -> None:
    """Write float32 zeros in the safetensors format, as a sparse file."""
    header: dict[str, Any] = {}
    end = 0
    for name, shape in tensors.items():
        size = 4 * math.prod(shape)
        header[name] = {"dtype": "F32", "shape": list(shape), "data_offsets": [end, end + size]}
        end += size
    text = json.dumps(header).encode()
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + end)


def write_model(folder: Path, **changes: Any) -> Path:
    """Write a complete model folder. ``changes`` go into config.json; a value of None removes the key."""
    folder.mkdir(parents=True, exist_ok=True)
    config = {name: value for name, value in (SHAPE | changes).items() if value is not None}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "tokenizer.json").write_text("{}")
    (folder / "tokenizer_config.json").write_text("{}")
    text = config.get("text_config") or config
    vocabulary, width = text.get("vocab_size", SHAPE["vocab_size"]), text.get("hidden_size", SHAPE["hidden_size"])
    tensors = {"model.embed_tokens.weight": (vocabulary, width), "model.norm.weight": (width,)}
    write_safetensors(folder / "model.safetensors", tensors)
    return folder
