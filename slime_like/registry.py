"""Resolve names in the configuration to objects. ``slime_like.config.schema.names`` lists them, ``resolve`` imports one."""

from __future__ import annotations

import difflib
import importlib
from collections.abc import Iterable, Mapping
from typing import Any

from slime_like.errors import ConfigError
from slime_like.util.user_module import user_module

SHORT_NAME = 3  # characters; one different letter makes another name: gpu is not a misspelled cpu


def nearest(name: str, names: Iterable[str]) -> str:
    """Return a hint for an unknown name: the closest known name, or all known names if none is close."""
    options = sorted(names)
    cutoff = 0.6 if len(name) > SHORT_NAME else 0.8
    close = difflib.get_close_matches(name, options, n=1, cutoff=cutoff)
    return f"did you mean {close[0]!r}?" if close else f"known: {', '.join(options)}"


def is_path(name: str | None) -> bool:
    """Return whether ``name`` is a path, ``module:attribute`` or ``file.py:attribute``, and not a name of a table."""
    return name is not None and ":" in name


def metric_part(name: str) -> str:
    """Return ``name`` as a part of a metric's name: a file without its folder. Example: ``/a/b.py:f`` gives ``b.py:f``."""
    return name.rpartition("/")[2] if is_path(name) else name


def check(key: str, name: str, table: Mapping[str, object], *, dotted: bool = False) -> None:
    """Raise ``ConfigError`` unless ``name`` is in ``table`` or, if ``dotted``, is a path."""
    if name in table or (dotted and is_path(name)):
        return
    extra = ", or a path such as my_package.my_module:my_function or my_file.py:my_function" if dotted else ""
    raise ConfigError(f"{key}={name!r} is unknown: {nearest(name, table)}{extra}")


def resolve(key: str, name: str, table: dict[str, str]) -> Any:
    """Import the object that ``table`` maps ``name`` to, or that the path ``name`` leads to.

    Raises ``ConfigError`` naming ``key`` if the module or attribute does not exist.
    """
    target = table.get(name, name)
    module_name, colon, attribute = target.rpartition(":")
    if not colon or not attribute:
        raise ConfigError(f"{key}={name!r} is unknown: {nearest(name, table)}")
    try:
        module = importlib.import_module(module_name) if name in table else user_module(key, name, module_name)
    except ModuleNotFoundError as error:
        raise ConfigError(f"{key}={name!r}: cannot import {module_name!r} ({error}): install the package") from error
    try:
        return getattr(module, attribute)
    except AttributeError as error:
        raise ConfigError(
            f"{key}={name!r}: module {module_name!r} has no {attribute!r}; {nearest(attribute, vars(module))}"
        ) from error
