"""Rejection of keys that were set but are not read under the current settings."""

from __future__ import annotations

from collections.abc import Container
from dataclasses import fields

from slime_like.config.schema.base import Config, default_of
from slime_like.errors import ConfigError


def refuse_unused_keys(prefix: str, config: Config, names: Container[str], setting: str, fix: str) -> None:
    """Raise ``ConfigError`` if one of the keys ``names``, which ``setting`` leaves unused, differs from its default.

    The message suggests ``fix``.
    """
    for item in fields(config):
        value = getattr(config, item.name)
        if item.name in names and value != default_of(item):
            raise ConfigError(
                f"{prefix}{item.name}={value!r} has no effect with {setting}: set {fix}, or remove {prefix}{item.name}"
            )
