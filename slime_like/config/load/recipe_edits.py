"""Removal of a key from recipes, for ``~key`` on a command line: find all included configs, and copy recipes without the key."""

from __future__ import annotations

import copy
import functools
import io
import os
import posixpath
import re
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple, cast

import yaml
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from slime_like.errors import ConfigError
from slime_like.util.reading import YAML_ERRORS, InputFile, reason

RECIPE = "recipe"
PRIMARY = "train.yaml"  # Hydra reads the primary config before it adds the folders of its search path
FIX = "correct it or its permissions"
# Hydra's directives, such as ``# @package _global_``. It reads them up to the first line of another kind.
_HEADER = re.compile(r"(\s*#[^\S\n]*@.*)*")
_KEYWORDS = re.compile(r"((?:optional |override )*)([^@]*)")


class _Included(NamedTuple):
    """Config named by a defaults list. Hydra resolves the names in this config's own defaults list relative to ``base``."""

    path: str  # relative to the folder of configs, without suffix
    base: str
    optional: bool


@contextmanager
def configs_without(configs: Path, files: Mapping[str, Path | None], keys: Sequence[str]) -> Generator[Path]:
    """Yield a temporary folder with copies of recipes from which ``keys`` are removed.

    ``files`` is a result of ``config_files``. The folder contains the primary config of ``configs`` and a copy of each recipe
    of ``files`` that sets one of ``keys``. Raises ``ConfigError`` naming a key that no recipe sets, or a file or folder that
    cannot be read or written. If a recipe is missing, a key that no recipe sets is not an error here: Hydra reports the
    missing recipe.
    """
    files = {name: path for name, path in files.items() if name.startswith(f"{RECIPE}/")}
    copies = {PRIMARY: InputFile(configs / PRIMARY, ConfigError, FIX).text()}
    set_keys: set[str] = set()
    for name, path in files.items():
        if path is None:
            continue
        tree = copy.deepcopy(_read(path))
        if removed := {key for key in keys if _remove(tree, key)}:
            set_keys |= removed
            header = _HEADER.match(InputFile(path, ConfigError, FIX).text())
            copies[f"{name}.yaml"] = f"{header[0] if header else ''}\n{OmegaConf.to_yaml(OmegaConf.create(tree))}"
    unset = next((key for key in keys if key not in set_keys), None)
    if unset is not None and all(files.values()):
        raise ConfigError(
            f"'~{unset}' ignores the setting of a recipe, but no recipe of this command sets {unset}: remove '~{unset}', "
            f"or set {unset} to another value"
        )
    with ExitStack() as stack:
        scratch_path: object = "the temporary folder"
        try:
            scratch = Path(stack.enter_context(TemporaryDirectory(ignore_cleanup_errors=True)))
            for name, text in copies.items():
                scratch_path = target = scratch / name
                target.parent.mkdir(parents=True, exist_ok=True)
                target.write_text(text, encoding="utf-8")
        except OSError as error:
            raise ConfigError(
                f"{error.filename or scratch_path} cannot be written ({reason(error)}), and '~{keys[0]}' needs a copy of "
                "the recipes in a temporary folder; free space there, or set TMPDIR to a folder that can be written"
            ) from error
        yield scratch


def config_files(folders: Sequence[Path], defaults: Sequence[Any]) -> dict[str, Path | None]:
    """Return a dict from name to file for the configs in ``defaults`` and those that they include.

    ``defaults`` is a defaults list of Hydra, such as ``[{"recipe": "quickstart"}]``. A name is the path without suffix in the
    folder of configs, such as ``recipe/quickstart``. A config is read from the first of ``folders`` that has it. The file of a
    missing config is None; a missing optional config is left out. Raises ``ConfigError`` naming a file that cannot be read.
    """
    files: dict[str, Path | None] = {}
    visits: set[_Included] = set()
    unvisited = list(_included(defaults, ""))
    while unvisited:
        item = unvisited.pop()
        if item in visits:
            continue
        visits.add(item)
        candidates = (folder / f"{item.path}.yaml" for folder in folders)
        path = next((file for file in candidates if os.path.lexists(file)), None)
        if path is not None:
            unvisited += _included(_read(path).get("defaults"), item.base)
        if path is not None or not item.optional:
            files[item.path] = path
    return files


def _included(defaults: Any, base: str) -> Iterator[_Included]:
    """Yield the configs that a defaults list names, resolved as Hydra resolves them: relative to ``base``.

    ``- mine/foo`` names the config ``foo`` in folder ``mine``; the names in the defaults list of ``foo`` are relative to this
    folder. ``- mine: foo`` chooses ``foo`` from the group ``mine``; the names in the defaults list of ``foo`` are relative to
    the group, even if the choice is ``foo/bar``. Entries with the keyword ``override`` are skipped.
    """
    for item in cast("list[Any]", defaults) if isinstance(defaults, list) else ():
        if isinstance(item, str) and item != "_self_":
            yield _config(base, item.partition("@")[0])
        if not isinstance(item, dict):
            continue
        for key, value in cast("dict[object, Any]", item).items():
            keywords, group = cast("re.Match[str]", _KEYWORDS.match(str(key))).groups()
            optional = "optional" in keywords
            if "override" in keywords:
                continue
            if isinstance(value, str):
                path = posixpath.join("/", base, group)
                yield _config("", f"{path}/{value}", optional)._replace(base=path.lstrip("/"))
            for name in cast("list[Any]", value) if isinstance(value, list) else ():
                yield _config(base, f"{group}/{name}", optional)


def _config(base: str, name: str, optional: bool = False) -> _Included:
    path = posixpath.join("/", base, name).lstrip("/")
    resolved = posixpath.normpath(f"/{path}").lstrip("/").removesuffix(".yaml")
    return _Included(resolved, posixpath.dirname(path), optional)


def _read(path: Path) -> dict[str, Any]:
    """Read a config as Hydra does and return its tree, with interpolations as text. Callers must not modify the tree.

    Raises ``ConfigError`` naming the file if it cannot be read or is not a mapping.
    """
    file = InputFile(path, ConfigError, FIX)
    text = file.text()
    try:
        tree = _parse(text)
    except (OmegaConfBaseException, *YAML_ERRORS) as error:
        raise file.refused(f"cannot be read as YAML ({reason(error)})") from error
    if tree is None:
        raise file.refused("is not a mapping of keys to settings")
    return tree


@functools.lru_cache(maxsize=256)  # configs that are composed in one process share most files
def _parse(text: str) -> dict[str, Any] | None:
    """Parse a config as Hydra does and return its tree, with interpolations as text; None if it is not a mapping."""
    if not isinstance(yaml.safe_load(text), dict | None):  # OmegaConf reads a word as the mapping {word: null}
        return None
    return cast("dict[str, Any]", OmegaConf.to_container(OmegaConf.load(io.StringIO(text)), resolve=False))


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
