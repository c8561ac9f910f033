"""Config overrides that SGLang needs in addition to a model's config.json (``--json-model-override-args``). Torch-free."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, cast

from slime_like.errors import CheckpointError

LINEAR = "linear_attention"
INTERVAL = "full_attention_interval"
ROTARY = ("partial_rotary_factor", "rope_theta")


def override_args(model_path: str) -> dict[str, Any]:
    """Return config fields that SGLang reads and the file lacks; empty for most models.

    - transformers 5 writes ``layer_types`` of hybrid models and drops the interval from which they follow; SGLang reads it.
    - transformers reads the rotated part of a head and the rotary base from ``rope_parameters``, and writes a default or
      nothing at the top level, where SGLang reads them (for Qwen3-Next the base, 10000 if absent).
    - Only the text part of a model with a vision part is served, since only that part is trained and sent.

    Raises ``CheckpointError`` if attention layers are not at a constant interval.
    """
    try:
        config = cast("dict[str, Any]", json.loads((Path(model_path) / "config.json").read_text()))
        nested = isinstance(config.get("text_config"), dict)
        text = cast("dict[str, Any]", config["text_config"] if nested else config)
        types = cast("list[str]", text.get("layer_types") or [])
    except (OSError, ValueError, KeyError, AttributeError):
        return {}  # not a local folder, or damaged: SGLang reports the problem when it reads the file
    if LINEAR not in types:
        return {}
    fields: dict[str, Any] = {} if INTERVAL in text else {INTERVAL: interval(types, model_path)}
    rotary = cast("dict[str, Any]", text.get("rope_parameters") or {})
    fields |= {name: rotary[name] for name in ROTARY if rotary.get(name) not in (None, text.get(name))}
    if not nested:
        return fields
    return ({"text_config": fields} if fields else {}) | {"language_model_only": True}


def merge_overrides(base: dict[str, Any], priority: dict[str, Any]) -> dict[str, Any]:
    """Merge overrides field by field, including nested configs; ``priority`` takes precedence."""
    merged = base | priority
    for name, value in base.items():
        if isinstance(value, dict) and isinstance(priority.get(name), dict):
            merged[name] = merge_overrides(cast("dict[str, Any]", value), priority[name])
    return merged


def interval(types: list[str], model_path: str) -> int:
    """Return the ``n`` for which exactly every n-th layer has full attention."""
    first = next((index for index, kind in enumerate(types) if kind != LINEAR), len(types))
    if any((kind != LINEAR) != ((index + 1) % (first + 1) == 0) for index, kind in enumerate(types)):
        raise CheckpointError(
            f"model.hf_checkpoint={model_path!r}: config.json has layer_types in which full attention does not come at one "
            "interval; SGLang serves hybrid models with every n-th layer full attention only"
        )
    return first + 1
