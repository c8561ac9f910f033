"""Resolve names in the configuration to objects. ``slime_like.config.schema.names`` lists them, ``resolve`` imports one."""

from __future__ import annotations

import difflib
import importlib
from collections.abc import Iterable
from typing import Any

from slime_like.errors import ConfigError


def nearest(name: str, names: Iterable[str]) -> str:
    """Return a hint for an unknown name: the closest known name, or all known names if none is close."""
    options = sorted(names)
    close = difflib.get_close_matches(name, options, n=1, cutoff=0.6)
    return f"did you mean {close[0]!r}?" if close else f"known: {', '.join(options)}"


def check(key: str, name: str, table: dict[str, str], *, dotted: bool = False) -> None:
    """Raise ``ConfigError`` unless ``name`` is in ``table`` or, if ``dotted``, looks like ``package.module:attribute``."""
    if name in table or (dotted and ":" in name):
        return
    extra = ", or a dotted path such as my_package.my_module:my_function" if dotted else ""
    raise ConfigError(f"{key}={name!r} is unknown: {nearest(name, table)}{extra}")


def resolve(key: str, name: str, table: dict[str, str]) -> Any:
    """Import the object that ``table`` maps ``name`` to, or the dotted path ``name`` itself.

    Raises ``ConfigError`` naming ``key`` if the module or attribute does not exist.
    """
    target = table.get(name, name)
    module_name, _, attribute = target.partition(":")
    if not attribute:
        raise ConfigError(f"{key}={name!r} is unknown: {nearest(name, table)}")
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"{key}={name!r}: cannot import {module_name!r} ({error}); is it installed and on PYTHONPATH?"
        ) from error
    try:
        return getattr(module, attribute)
    except AttributeError as error:
        raise ConfigError(
            f"{key}={name!r}: module {module_name!r} has no {attribute!r}; {nearest(attribute, vars(module))}"
        ) from error
