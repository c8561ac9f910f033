"""Removal of settings from recipes, for ``~key`` on a command line."""

from __future__ import annotations

import re
import shutil
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, cast

import yaml

from slime_like.errors import ConfigError
from slime_like.util.reading import InputFile

RECIPE = "recipe"
_HEADER = re.compile(r"^# @package .*$", re.MULTILINE)


@contextmanager
def configs_without(
    configs: Path, folders: Sequence[Path], recipes: Sequence[str], keys: Sequence[str]
) -> Generator[Path]:
    """Yield a copy of the folder ``configs`` whose ``recipes``, and the recipes that they include, lack ``keys``.

    Recipes are read from ``configs`` and then from ``folders``; Hydra reports a recipe that none of them has. Raises
    ``ConfigError`` naming a key that no recipe sets.
    """
    files = _with_included([configs, *folders], recipes)
    with TemporaryDirectory() as scratch:
        copy = Path(scratch) / "configs"
        shutil.copytree(configs, copy)
        set_keys: set[str] = set()
        for path in filter(None, files.values()):
            tree = _read(path)
            if removed := {key for key in keys if _remove(tree, key)}:
                set_keys |= removed
                header = _HEADER.search(path.read_text())
                text = yaml.safe_dump(tree, sort_keys=False, allow_unicode=True)
                (copy / RECIPE / path.name).write_text(f"{header[0] if header else ''}\n{text}")
        unset = next((key for key in keys if key not in set_keys), None)
        if unset is not None and all(files.values()):
            raise ConfigError(
                f"~{unset} ignores the setting of a recipe, but no recipe of this command sets {unset}: remove ~{unset}, or set "
                f"{unset} to another value"
            )
        yield copy


def _with_included(folders: Sequence[Path], recipes: Sequence[str]) -> dict[str, Path | None]:
    """Return a dict from the names of ``recipes``, and of the recipes that they include, to their files, None if missing."""
    paths: dict[str, Path | None] = {}
    remaining = list(recipes)
    while remaining:
        name = remaining.pop().removeprefix(f"/{RECIPE}/")
        if name in paths:
            continue
        candidates = (folder / RECIPE / f"{name}.yaml" for folder in folders)
        path = paths[name] = next((file for file in candidates if file.is_file()), None)
        included: Any = _read(path).get("defaults") if path is not None else None
        remaining += [item for item in included or () if isinstance(item, str) and item != "_self_"]
    return paths


def _read(path: Path) -> dict[str, Any]:
    tree: Any = InputFile(path, ConfigError, "correct it").yaml()
    return cast("dict[str, Any]", tree) if isinstance(tree, dict) else {}


def _remove(tree: Mapping[str, Any], key: str) -> bool:
    """Remove a dotted ``key`` from ``tree`` and return whether it was there."""
    *groups, last = key.split(".")
    node: Any = tree
    for group in groups:
        node = cast("dict[str, Any]", node).get(group) if isinstance(node, dict) else None
    if not isinstance(node, dict) or last not in node:
        return False
    del node[last]
    return True
