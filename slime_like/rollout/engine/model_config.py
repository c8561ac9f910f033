"""SGLang settings that follow from a model's config.json. Torch-free."""

from __future__ import annotations

import json
import re
from importlib.util import find_spec
from pathlib import Path
from typing import Any, cast

from slime_like.config.rules.quantised import CONFIG_KEY
from slime_like.config.schema.names import FAMILIES
from slime_like.errors import CheckpointError

LINEAR = "linear_attention"
INTERVAL = "full_attention_interval"
UNGROUPED = {"n_group": 1, "topk_group": 1}
ROTARY = ("partial_rotary_factor", "rope_theta")


def override_args(model_path: str, *, keeps_float8: bool = False) -> dict[str, Any]:
    """Return the fields of config.json that SGLang must override, with their values; empty for most models.

    - For hybrid models, transformers 5 writes ``layer_types``, but SGLang reads the interval between full-attention
      layers.
    - For these models, transformers stores the rotated fraction of a head and the rotary base in ``rope_parameters``.
      SGLang instead reads the fraction and, for Qwen3-Next, also the base (10000 if absent) at the top level, where
      transformers writes a default or nothing.
    - A hybrid model with a vision part is served as a text model, since only the text part is trained and pushed.
    - A model with float8 weights is served without quantisation, since the trainer pushes weights of ``model.dtype``.
      The plugin ``dequantise`` multiplies the weights that SGLang reads by their scales. ``keeps_float8`` keeps float8.
    - SGLang's DeepSeek models choose experts within groups even if ``topk_method`` is greedy, which has no groups: the
      overrides declare a single group.
    - Some families need ``FamilyEntry.engine_fields``. Families with ``FamilyEntry.engine_rotary_dim`` also need
      ``rotary_dim``.

    Raises ``CheckpointError`` if a hybrid model's config.json lacks the interval and its full-attention layers are not evenly
    spaced.
    """
    config = _config(model_path)
    quantisation = {CONFIG_KEY: None} if config.get(CONFIG_KEY) is not None and not keeps_float8 else {}
    nested = isinstance(config.get("text_config"), dict)
    text = cast("dict[str, Any]", config["text_config"] if nested else config)
    types = text.get("layer_types") or []
    fields = quantisation | _family_fields(text)
    return fields | (_hybrid_fields(text, types, model_path, nested=nested) if LINEAR in types else {})


def is_quantised(model_path: str) -> bool:
    """Return whether config.json of a local folder declares quantised weights."""
    return _config(model_path).get(CONFIG_KEY) is not None


def _config(model_path: str) -> dict[str, Any]:
    """Return config.json; empty if it is missing or damaged, which SGLang reports when it reads the file itself."""
    try:
        config = json.loads((Path(model_path) / "config.json").read_text())
    except (OSError, ValueError):
        return {}
    return cast("dict[str, Any]", config) if isinstance(config, dict) else {}


def _family_fields(text: dict[str, Any]) -> dict[str, Any]:
    """Return fields that the model's family needs and ``text`` lacks, and a single group if ``topk_method`` is greedy."""
    family = FAMILIES.get(str(text.get("model_type")))
    fields = {} if family is None else {name: value for name, value in family.engine_fields.items() if name not in text}
    if family is not None and family.engine_rotary_dim and "rotary_dim" not in text:
        rotary = cast("dict[str, Any]", text.get("rope_parameters") or text)
        head_dim = text.get("head_dim") or text["hidden_size"] // text["num_attention_heads"]
        fields["rotary_dim"] = int(head_dim * (rotary.get("partial_rotary_factor") or 1.0))
    return fields | (dict(UNGROUPED) if text.get("topk_method") == "greedy" else {})


def _hybrid_fields(text: dict[str, Any], types: list[str], model_path: str, *, nested: bool) -> dict[str, Any]:
    fields: dict[str, Any] = {} if INTERVAL in text else {INTERVAL: interval(types, model_path)}
    rotary = cast("dict[str, Any]", text.get("rope_parameters") or {})
    fields |= {name: rotary[name] for name in ROTARY if rotary.get(name) not in (None, text.get(name))}
    if not nested:
        return fields
    return ({"text_config": fields} if fields else {}) | {"language_model_only": True}


def merge_overrides(base: dict[str, Any], priority: dict[str, Any]) -> dict[str, Any]:
    """Merge overrides field by field, including nested configs; ``priority`` takes precedence."""
    overrides = base | priority
    for name, value in base.items():
        if isinstance(value, dict) and isinstance(priority.get(name), dict):
            overrides[name] = merge_overrides(cast("dict[str, Any]", value), priority[name])
    return overrides


def interval(types: list[str], model_path: str) -> int:
    """Return the interval n of full attention: every n-th layer, and no other, has it.

    Raises ``CheckpointError`` if the layers with full attention are not evenly spaced.
    """
    first = next((index for index, kind in enumerate(types) if kind != LINEAR), len(types))
    if any((kind != LINEAR) != ((index + 1) % (first + 1) == 0) for index, kind in enumerate(types)):
        raise CheckpointError(
            f"model.hf_checkpoint={model_path!r}: config.json: the full-attention layers in layer_types are not evenly "
            "spaced; SGLang supports only hybrid models in which every n-th layer uses full attention"
        )
    return first + 1


def other_models(model_path: str) -> list[str]:
    """Return the names of SGLang's model modules that do not define the architecture of ``model_path``.

    SGLang imports all of its model modules, about 250, to find one class. It skips those that the environment variable
    ``SGLANG_DISABLED_MODEL_ARCHS`` names. The list is empty if SGLang or the architecture is not found.
    """
    spec = find_spec("sglang")
    config = Path(model_path) / "config.json"
    if spec is None or not spec.submodule_search_locations or not config.is_file():
        return []
    try:
        architectures = "|".join(map(re.escape, json.loads(config.read_text())["architectures"]))
    except (ValueError, KeyError, TypeError):
        return []  # SGLang reports the problem when it reads the file
    definition = re.compile(rf"^class ({architectures})\b", re.MULTILINE)
    files = sorted((Path(spec.submodule_search_locations[0]) / "srt" / "models").glob("*.py"))
    defining_files = {file for file in files if definition.search(file.read_text())}
    return [file.stem for file in files if file not in defining_files] if defining_files else []
