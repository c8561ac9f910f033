"""Translation of slime's ``--eval-config``, a YAML or JSON file of held-out sets, to keys of ``evaluation``."""

from __future__ import annotations

import os.path
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, cast

from slime_like.config.schema.render import render
from slime_like.errors import ConfigError
from slime_like.util.reading import InputFile, abbreviate

FLAG = "--eval-config"
SETTINGS = {
    "n_samples_per_eval_prompt": "n_samples_per_prompt",
    "temperature": "temperature",
    "top_p": "top_p",
    "top_k": "top_k",
    "max_response_len": "max_response_len",
    "rm_type": "rm_type",
    "input_key": "input_key",
    "label_key": "label_key",
    "metadata_key": "metadata_key",
    "apply_chat_template": "apply_chat_template",
}
"""Field of a dataset in slime -> its name in ``evaluation.overrides``. Other fields of slime have no counterpart."""


def eval_config_overrides(path: Path) -> Iterator[str]:
    """Yield the overrides of ``evaluation.datasets`` and ``evaluation.overrides`` that are equivalent to the file ``path``.

    Raises ``ConfigError`` naming the file if it cannot be read or is malformed, or has no datasets or an invalid one. The error
    also names the field if a field has no equivalent here or contains a reference (``${...}``).
    """
    file = InputFile(
        Path(os.path.expanduser(path)), ConfigError, "give a mapping with datasets, each with a name and a path", FLAG
    )
    tree: Any = file.yaml()
    tree = tree.get("eval", tree) if isinstance(tree, dict) else tree
    if not isinstance(tree, dict):
        raise file.refused("is not a mapping")
    config = cast("dict[str, Any]", tree)
    defaults = config.get("defaults") or {}
    if not isinstance(defaults, Mapping):
        raise file.refused(f"has defaults={abbreviate(defaults)}, which is not a mapping")
    datasets = list(_datasets(config.get("datasets"), file))
    if not datasets:
        raise file.refused("names no datasets")
    yield "evaluation.datasets={}"
    for fields in datasets:
        name, data = fields["name"], fields["path"]
        settings = {**cast("Mapping[str, Any]", defaults), **fields}
        if reference := next((field for field, value in settings.items() if "${" in str(value)), ""):
            raise file.refused(
                f"has {name}.{reference}={abbreviate(settings[reference])}, a reference: write the value"
            )
        yield f"evaluation.datasets.{name}={render(data)}"
        settings = dict(_settings(name, settings, file))
        if settings:
            yield f"evaluation.overrides.{name}={render(settings)}"


def _datasets(value: object, file: InputFile) -> Iterator[dict[str, Any]]:
    """Yield the fields of each dataset in ``value``, a list or a mapping by name; nothing for other values.

    Raises ``ConfigError`` for a dataset without a valid name or without a path, and for a name that is given twice.
    """
    if isinstance(value, Mapping):
        by_name = cast("Mapping[str, Any]", value)
        items: list[Any] = [
            {"name": name, **entry} if isinstance(entry, Mapping) else entry for name, entry in by_name.items()
        ]
    else:
        items = cast("list[Any]", value) if isinstance(value, list) else []
    names: set[str] = set()
    for item in items:
        fields = cast("dict[str, Any]", item) if isinstance(item, dict) else {}
        name, path = fields.get("name"), fields.get("path")
        if not (isinstance(name, str) and re.fullmatch(r"[\w-]+", name) and isinstance(path, str) and path):
            raise file.refused(
                f"has a dataset {abbreviate(item)}: a dataset needs a name (letters, digits, - and _) and a path"
            )
        if name in names:
            raise file.refused(f"has two datasets with the name {name}")
        names.add(name)
        yield fields


def _settings(name: str, fields: Mapping[str, Any], file: InputFile) -> Iterator[tuple[str, Any]]:
    for field, value in fields.items():
        if field in ("name", "path") or value in (None, {}, []):
            continue
        if field not in SETTINGS:
            raise file.refused(
                f"has {name}.{field}={abbreviate(value)}, which has no equivalent here: a dataset may have {', '.join(SETTINGS)}"
            )
        yield SETTINGS[field], value
