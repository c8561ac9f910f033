"""Base class of config groups. Keys have a help text, are checked at load and are read-only afterwards."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import MISSING as NO_DEFAULT
from dataclasses import Field, dataclass, field, fields, is_dataclass
from typing import Any

from slime_like.errors import ConfigError
from slime_like.registry import not_one_of, own_entry

MISSING: Any = "???"  # OmegaConf's marker for a required key


def key(default: Any, help: str, *, choices: tuple[str, ...] = (), table: str = "") -> Any:
    """Return a dataclass field for a config key with its default, its help text and, for strings, the allowed values.

    If ``choices`` are the names in a table of ``schema.names``, ``table`` is the name of that table: error messages then
    say how to add an entry to it.
    """
    metadata = {"help": help, "choices": choices, "table": table}
    if isinstance(default, (list, dict)):
        return field(default_factory=lambda: type(default)(default), metadata=metadata)  # pyright: ignore[reportUnknownArgumentType, reportUnknownLambdaType, reportUnknownVariableType]
    if isinstance(default, type):
        return field(default_factory=default, metadata=metadata)
    return field(default=default, metadata=metadata)


@dataclass(kw_only=True)
class Config:
    """Config group. ``seal`` makes it and its sub-groups read-only; pickling keeps the seal."""

    def __setattr__(self, name: str, value: Any) -> None:
        if self.__dict__.get("_sealed"):
            raise AttributeError(f"config is sealed: cannot set {type(self).__name__}.{name}; use dataclasses.replace")
        object.__setattr__(self, name, value)

    def seal(self) -> None:
        """Make this group and its sub-groups read-only."""
        for item in fields(self):
            value = getattr(self, item.name)
            if isinstance(value, Config):
                value.seal()
        object.__setattr__(self, "_sealed", True)

    def check(self, prefix: str) -> None:
        """Raise ``ConfigError`` on a value outside its choices, in this group and its sub-groups.

        ``prefix`` is the dotted name of the group with a trailing dot. Groups extend this method with their own rules.
        """
        for item in fields(self):
            value = getattr(self, item.name)
            choices: tuple[str, ...] = item.metadata.get("choices", ())
            if choices and value not in choices:
                hint = own_entry(item.metadata.get("table", ""))
                raise ConfigError(f"{prefix}{item.name}={value!r} {not_one_of(str(value), choices)}{hint}")
            if isinstance(value, Config):
                value.check(f"{prefix}{item.name}.")


def keys(group: type[Config] | Config, prefix: str = "") -> Iterator[tuple[str, Field[Any]]]:
    """Yield (dotted key, dataclass field) for every key of a group and its sub-groups.

    ``algo``, whose group depends on the algorithm, counts as one key.
    """
    for item in fields(group):
        factory = item.default_factory
        if isinstance(factory, type) and is_dataclass(factory) and issubclass(factory, Config):
            yield from keys(factory, f"{prefix}{item.name}.")
        else:
            yield f"{prefix}{item.name}", item


def default_of(item: Field[Any]) -> Any:
    """Return the field's default value, or ``???`` for a required key."""
    if item.default is not NO_DEFAULT:
        return item.default
    return item.default_factory() if item.default_factory is not NO_DEFAULT else MISSING


def positive(prefix: str, config: Config, *names: str, finite: bool = True) -> None:
    """Raise ``ConfigError`` unless each named number is above zero and, with ``finite``, not infinite. ``None`` passes."""
    for name in names:
        value = getattr(config, name)
        if value is not None and not value > 0:
            raise ConfigError(f"{prefix}{name}={value!r} must be above 0")
        if finite and value == math.inf:
            raise ConfigError(f"{prefix}{name}={value!r} must be finite: set a large number, such as 1e6")


def within(prefix: str, config: Config, low: float, high: float, *names: str) -> None:
    """Raise ``ConfigError`` unless each named number lies in ``[low, high]`` or is ``None``."""
    for name in names:
        value = getattr(config, name)
        if value is not None and not low <= value <= high:
            raise ConfigError(f"{prefix}{name}={value!r} must lie in [{low:g}, {high:g}]")
