"""What SGLang must be told about a model beside its config.json: ``--json-model-override-args``. Torch-free."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, cast

from slime_like.errors import CheckpointError

LINEAR = "linear_attention"
INTERVAL = "full_attention_interval"
ROTARY = ("partial_rotary_factor", "rope_theta")


def override_args(model_path: str) -> dict[str, Any]:
    """Fields of the config that SGLang reads and the file does not have; empty for most models.

    - transformers 5 writes ``layer_types`` of hybrid models and drops the interval they follow, which SGLang wants.
    - transformers reads the rotated part of a head and the rotary base from ``rope_parameters``, and writes a default or nothing
      beside them, where SGLang reads them (of Qwen3-Next the base: 10000 where there is none).
    - Of a model with a vision part only the text part is served: it is what is trained and sent.

    Raises ``CheckpointError`` where attention layers do not come at one interval.
    """
    try:
        config = cast("dict[str, Any]", json.loads((Path(model_path) / "config.json").read_text()))
        nested = isinstance(config.get("text_config"), dict)
        text = cast("dict[str, Any]", config["text_config"] if nested else config)
        types = cast("list[str]", text.get("layer_types") or [])
    except (OSError, ValueError, KeyError, AttributeError):
        return {}  # not a local folder, or damaged: SGLang's own reading of it says what is wrong
    if LINEAR not in types:
        return {}
    fields: dict[str, Any] = {} if INTERVAL in text else {INTERVAL: interval(types, model_path)}
    rotary = cast("dict[str, Any]", text.get("rope_parameters") or {})
    fields |= {name: rotary[name] for name in ROTARY if rotary.get(name) not in (None, text.get(name))}
    if not nested:
        return fields
    return ({"text_config": fields} if fields else {}) | {"language_model_only": True}


def joined(ours: dict[str, Any], given: dict[str, Any]) -> dict[str, Any]:
    """Overrides of two sides, field by field also within nested configs; ``given`` goes first."""
    both = ours | given
    for name, value in ours.items():
        if isinstance(value, dict) and isinstance(given.get(name), dict):
            both[name] = joined(cast("dict[str, Any]", value), given[name])
    return both


def interval(types: list[str], model_path: str) -> int:
    """The ``n`` for which every n-th layer, and no other, has full attention."""
    first = next((index for index, kind in enumerate(types) if kind != LINEAR), len(types))
    if any((kind != LINEAR) != ((index + 1) % (first + 1) == 0) for index, kind in enumerate(types)):
        raise CheckpointError(
            f"model.hf_checkpoint={model_path!r}: config.json has layer_types in which full attention does not come at one "
            "interval; SGLang serves hybrid models with every n-th layer full attention only"
        )
    return first + 1
