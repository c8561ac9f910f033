"""A Hugging Face model folder, read as plain JSON and safetensors headers: no torch, no transformers."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

from slime_like.errors import CheckpointError

ROPE_TYPES: dict[str, tuple[str, ...]] = {
    "default": (),
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
}
"""Supported kinds of rotary embedding -> what each must say in config.json."""
EXPERT_COUNTS = ("num_experts", "num_local_experts", "n_routed_experts")  # a family has one of these keys, or none
TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json")


@dataclass(frozen=True, slots=True)
class GDNShape:
    """The Gated DeltaNet layers of a hybrid model."""

    key_heads: int
    value_heads: int
    key_dim: int  # per head
    value_dim: int  # per head
    conv_width: int


@dataclass(frozen=True, slots=True)
class HfConfig:
    """What the run needs to know of a model's config.json before it is loaded."""

    folder: str
    model_type: str
    num_layers: int
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    vocab_size: int
    max_positions: int
    num_experts: int  # 0: dense
    tied: bool  # whether the output layer is the embedding, as far as config.json says so
    gdn: GDNShape | None = None  # None: attention in every layer
    rope_key: str = "rope_scaling"  # where config.json says how rotary frequencies are scaled
    rope: Mapping[str, Any] = field(default_factory=dict[str, Any])


def read_hf_config(key: str, folder: str) -> HfConfig:
    """``config.json`` of ``folder``. Raises ``CheckpointError`` naming ``key`` where it is missing or not a model's."""
    path = Path(folder) / "config.json"
    if not Path(folder).is_dir():
        raise CheckpointError(f"{key}={folder!r} is not a folder: give the path of a downloaded Hugging Face model")
    values = read_json(key, path)
    text = cast("dict[str, Any]", values.get("text_config") or values)
    model_type = str(values.get("model_type", ""))
    rope_key = "rope_parameters" if text.get("rope_parameters") else "rope_scaling"
    try:
        heads = int(text["num_attention_heads"])
        return HfConfig(
            folder=folder,
            model_type=model_type,
            num_layers=int(text["num_hidden_layers"]),
            hidden_size=int(text["hidden_size"]),
            num_heads=heads,
            num_kv_heads=int(text.get("num_key_value_heads") or heads),
            vocab_size=int(text["vocab_size"]),
            max_positions=int(text["max_position_embeddings"]),
            num_experts=num_experts(text),
            tied=bool(values.get("tie_word_embeddings")),
            gdn=gdn_shape(text),
            rope_key=rope_key,
            rope=cast("dict[str, Any]", text.get(rope_key) or {}),
        )
    except KeyError as error:
        raise CheckpointError(
            f"{key}={folder!r}: config.json has no {error}; is it the config of a causal language model?"
        ) from error


def num_experts(text: Mapping[str, Any]) -> int:
    """Routed experts of a layer; 0 also where no layer has any, whatever their number."""
    dense = set(cast("list[int]", text.get("mlp_only_layers") or ()))
    if dense.issuperset(range(int(text["num_hidden_layers"]))):
        return 0
    return next((int(text[name]) for name in EXPERT_COUNTS if text.get(name)), 0)


def gdn_shape(text: Mapping[str, Any]) -> GDNShape | None:
    """The Gated DeltaNet layers that the text part of a config.json describes; None where it has none."""
    if "linear_num_value_heads" not in text:
        return None
    return GDNShape(
        key_heads=int(text["linear_num_key_heads"]),
        value_heads=int(text["linear_num_value_heads"]),
        key_dim=int(text["linear_key_head_dim"]),
        value_dim=int(text["linear_value_head_dim"]),
        conv_width=int(text["linear_conv_kernel_dim"]),
    )


def padded_vocabulary(vocab_size: int, tp: int) -> int:
    """Rows of embedding and output layer: a multiple of 128 where tp divides that, so that checkpoints can be resharded."""
    multiple = 128 if 128 % tp == 0 else 128 * tp
    return -(-vocab_size // multiple) * multiple


def check_rope(key: str, model: HfConfig) -> None:
    """Raise ``CheckpointError`` on a scaling of rotary frequencies that is not supported or not told in full."""
    kind = model.rope.get("rope_type", model.rope.get("type", "default"))
    where = f"{key}={model.folder!r}: config.json has {model.rope_key}.rope_type={kind!r}"
    if kind not in ROPE_TYPES:
        raise CheckpointError(
            f"{where}, which is not supported: only {', '.join(ROPE_TYPES)}; "
            "remove the scaling to train within the model's original positions"
        )
    if missing := [name for name in ROPE_TYPES[kind] if not isinstance(model.rope.get(name), (int, float))]:
        raise CheckpointError(f"{where} without a number for {', '.join(missing)}: add it, as the model's page has it")


def read_json(key: str, path: Path) -> dict[str, Any]:
    """A JSON object. Raises ``CheckpointError`` naming ``key`` and the file."""
    try:
        values = json.loads(path.read_text())
    except FileNotFoundError as error:
        raise CheckpointError(
            f"{key}: {path} is missing; give a folder in Hugging Face format (config.json, tokenizer, safetensors)"
        ) from error
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{key}: {path} cannot be read as JSON ({error}); download it again") from error
    if not isinstance(values, dict):
        raise CheckpointError(f"{key}: {path} holds no JSON object; download it again")
    return cast("dict[str, Any]", values)


def check_weights(key: str, folder: str) -> int:
    """Number of parameters in the safetensors of ``folder``, after checking that every file is there and whole.

    Whole means: its size is what its header says. Raises ``CheckpointError`` naming ``key`` and the file.
    """
    root = Path(folder)
    index = root / "model.safetensors.index.json"
    if not index.exists():
        single = root / "model.safetensors"
        if not single.exists():
            raise CheckpointError(
                f"{key}={folder!r} has neither model.safetensors nor model.safetensors.index.json: "
                "download the model in safetensors format"
            )
        return sum(_numel(entry) for entry in _header(key, single).values())
    weight_map = read_json(key, index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(f"{key}: {index} has no weight_map; download it again")
    placed = cast("dict[str, str]", weight_map)
    headers = {file: _header(key, root / file) for file in sorted(set(placed.values()))}
    if lost := sorted(name for name, file in placed.items() if name not in headers[file]):
        raise CheckpointError(
            f"{key}: {index} places {lost[0]!r} in {placed[lost[0]]}, which does not hold it "
            f"({len(lost)} such tensors); download the model again"
        )
    return sum(_numel(entry) for header in headers.values() for entry in header.values())


def check_tokenizer(key: str, folder: str, *, needs_template: str) -> None:
    """Raise ``CheckpointError`` where the tokenizer, or the chat template that ``needs_template`` asks for, is missing."""
    root = Path(folder)
    if not any((root / name).exists() for name in TOKENIZER_FILES):
        raise CheckpointError(
            f"{key}={folder!r} has no tokenizer (one of {', '.join(TOKENIZER_FILES)}); copy it from the model's page"
        )
    if needs_template and not has_chat_template(key, folder):
        raise CheckpointError(
            f"{needs_template}, but the tokenizer of {key}={folder!r} has no chat template: "
            "use an instruct model's tokenizer, add chat_template.jinja, or do without"
        )


def has_chat_template(key: str, folder: str) -> bool:
    """Whether the tokenizer of ``folder`` comes with a chat template."""
    root = Path(folder)
    if (root / "chat_template.jinja").exists() or (root / "chat_template.json").exists():
        return True
    settings = root / "tokenizer_config.json"
    return settings.exists() and bool(read_json(key, settings).get("chat_template"))


def _numel(entry: Mapping[str, Any]) -> int:
    size = 1
    for extent in entry["shape"]:
        size *= int(extent)
    return size


def _header(key: str, path: Path) -> dict[str, dict[str, Any]]:
    """Tensors of one safetensors file: name -> dtype, shape, data_offsets. Checks the file's size against them."""
    again = "download it again"
    if not path.exists():
        raise CheckpointError(f"{key}: {path} is missing, though the index lists it; {again}")
    size = path.stat().st_size
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if size < 8 or length > size - 8:
            raise CheckpointError(f"{key}: {path} is cut off inside its header ({size} bytes); {again}")
        try:
            values: dict[str, Any] = json.loads(file.read(length))
            header = {name: entry for name, entry in values.items() if name != "__metadata__"}
            end = max((int(entry["data_offsets"][1]) for entry in header.values()), default=0)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise CheckpointError(f"{key}: {path} has no readable safetensors header ({error}); {again}") from error
    if size != 8 + length + end:
        raise CheckpointError(f"{key}: {path} has {size} bytes where its header needs {8 + length + end}; {again}")
    return header
