"""State of the translation of a verl job: its settings, our overrides so far, and a report row for each setting."""

from __future__ import annotations

import functools
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

from slime_like.config.schema.base import default_of
from slime_like.config.schema.known import ALGORITHMS, format_value, free_root, known_keys
from slime_like.config.schema.policy import AlgoConfig
from slime_like.config.schema.render import render
from slime_like.errors import ConfigError
from slime_like_compat.conversion_rows import Row, same_value
from slime_like_compat.verl.defaults import VALUES
from slime_like_compat.verl.names import canonical

MAX_NUMBER = 1e300


@dataclass(frozen=True, slots=True)
class Setting:
    """``key=value`` of a verl job."""

    name: str  # as written
    value: Any
    text: str  # the value as written
    file_line: str
    problem: str = ""

    @property
    def key(self) -> str:
        """Name of the key in this package's tables, even if the job gives a ``LEGACY`` name."""
        return canonical(self.name)


@functools.cache
def _algorithm(name: str) -> AlgoConfig:
    """Return an algorithm's default settings. They are cached, so callers must not modify them."""
    return ALGORITHMS[name]()


@dataclass(slots=True)
class Job:
    """Settings by key, and a report row for each. ``user_overrides`` maps our keys to the texts ``key=value`` of ``--with``.

    A method that reads an unknown value returns verl's default or a placeholder, so that the translation can go on; the
    row that ``report_needed`` adds then blocks the recipe.
    """

    settings: dict[str, Setting]
    drop: frozenset[str]  # keys, by their names in the tables
    user_overrides: dict[str, str]
    algo: str = "grpo"
    overrides: dict[str, str] = field(default_factory=dict[str, str])
    rows: list[Row] = field(default_factory=list[Row])
    reported: set[str] = field(default_factory=set[str])
    needed: set[str] = field(default_factory=set[str])  # keys that were read although their value is unknown

    def has(self, key: str) -> bool:
        """Return whether the job sets ``key`` and the user did not drop it."""
        return key in self.settings and key not in self.drop

    def dropped(self, key: str) -> bool:
        """Return whether the user dropped ``key``."""
        return key in self.drop

    def value(self, key: str) -> Any:
        """Return the value of ``key`` in the job, or verl's default if the job does not set it or the user dropped it.

        For an unknown value, add ``key`` to ``needed`` and return verl's default. A key without a default in ``VALUES`` gives
        None if its value is unknown, and raises ``KeyError`` if the job does not set it or the user dropped it.
        """
        if not self.has(key):
            return VALUES[key]
        setting = self.settings[key]
        if setting.problem:
            self.needed.add(key)
            return VALUES.get(key)
        return setting.value

    def sets(self, key: str) -> bool:
        """Return whether the job sets ``key`` and its ``value`` is not null."""
        return self.has(key) and self.value(key) is not None

    def number(self, key: str) -> float:
        """Return the value of ``key`` as a number.

        Raises ``ConfigError`` unless it is a number from -``MAX_NUMBER`` to ``MAX_NUMBER``.
        """
        value = self.value(key)
        if self._is_placeholder(key, value):
            return 1
        if (number := _number(value)) is None:
            raise self.wrong(key, "is not a number")
        return number

    def integer(self, key: str) -> int:
        """Return the value of ``key`` as a whole number. Raises ``ConfigError`` if it is not one."""
        value = self.number(key)
        if value != int(value):
            raise self.wrong(key, "is not a whole number")
        return int(value)

    def count(self, key: str) -> int:
        """Return the value of ``key`` as a whole number above 0. Raises ``ConfigError`` if it is not one."""
        value = self.integer(key)
        if value < 1:
            raise self.wrong(key, "must be 1 or more")
        return value

    def pair(self, key: str) -> tuple[float, float]:
        """Return the value of ``key`` as two numbers. Raises ``ConfigError`` unless it is a list of two numbers."""
        value = self.value(key)
        if self._is_placeholder(key, value):
            return 0.5, 0.5
        items = cast("list[object]", value) if isinstance(value, list) else []
        match [_number(item) for item in items]:
            case [float() | int() as first, float() | int() as second]:
                return float(first), float(second)
            case _:
                raise self.wrong(key, "is not a pair of numbers, as in [0.9,0.999]")

    def switch(self, key: str) -> bool:
        """Return the value of ``key`` as a bool; 0 and null are false, 1 is true. Raises ``ConfigError`` on any other value."""
        value = self.value(key)
        if value in (None, 0, 1) and not isinstance(value, float):
            return bool(value)
        raise self.wrong(key, "is neither true nor false")

    def text(self, key: str) -> str:
        """Return the value of ``key`` as text. Raises ``ConfigError`` unless it is a text or a number."""
        value = self.value(key)
        if self._is_placeholder(key, value):
            return ""
        if (text := _text(value)) is None:
            raise self.wrong(key, "is not text")
        return text

    def texts(self, key: str) -> list[str]:
        """Return the value of ``key``, a list of texts and numbers, as a list of texts.

        A single text or number gives a list of one, null an empty list. Raises ``ConfigError`` on any other value.
        """
        value = self.value(key)
        items = cast("list[object]", value) if isinstance(value, list) else [] if value is None else [value]
        texts = [text for item in items if (text := _text(item)) is not None]
        if len(texts) < len(items):
            raise self.wrong(key, "is neither text nor a list of texts")
        return texts

    def _is_placeholder(self, key: str, value: object) -> bool:
        """Return whether ``value`` is None because the value of ``key`` is unknown.

        The caller then returns a placeholder, and no recipe is written.
        """
        return value is None and key in self.needed

    def wrong(self, key: str, reason: str) -> ConfigError:
        """Return the error for a wrong value of ``key``.

        The error names the place of the setting, or says that the value is verl's default.
        """
        if not self.has(key):
            default, cause, fix = VALUES.get(key), "", "add"
            if key in self.drop:
                cause, fix = ", because of --drop", "remove --drop and add"
            return ConfigError(
                f"{key}={default!r} (verl's default{cause}) {reason}; {fix} {key}=VALUE to the command line"
            )
        setting = self.settings[key]
        return ConfigError(
            f"{setting.file_line}: {setting.name}={setting.text} {reason}; --drop {setting.name} leaves it out"
        )

    def needs(self, key: str, other_key: str, example: object) -> ConfigError:
        """Return the error for a value of ``key`` that needs ``other_key``, which is null or not set.

        ``example`` is a possible value of ``other_key``.
        """
        state = "null" if self.has(other_key) else "not given"
        return self.wrong(key, f"needs {other_key}, which is {state}: give {other_key}={format_value(example)}")

    def set(self, our_key: str, value: Any, key: str, note: str = "") -> None:
        """Set ``our_key`` to ``value``, the translation of verl's ``key``, and report it.

        A value of ``--with`` takes precedence. For a ``key`` that the job does not set, nothing happens if ``value`` is our
        default or ``--with`` sets ``our_key``. Raises ``ConfigError`` if JSON cannot represent the value.
        """
        try:
            json.dumps(value, allow_nan=False)
        except (TypeError, ValueError, RecursionError) as error:
            raise self.wrong(key, "contains a value that JSON cannot represent") from error
        is_set = self.has(key)
        if not is_set and (our_key in self.user_overrides or same_value(value, self.default(our_key))):
            return
        if our_key not in self.user_overrides:
            self.overrides[our_key] = render(value)
        if is_set:
            self.report(key, "mapped", note, our_key)
        else:
            text = "" if VALUES.get(key) is None else str(VALUES[key])
            self.rows.append(
                Row(key, text, "", "default", (our_key,), note or "verl's default is written into the recipe")
            )

    def default(self, our_key: str) -> Any:
        """Return the default of one of our keys under the job's algorithm.

        The result is None for a mapping with free keys, and for a key inside such a mapping.
        """
        if our_key == "algo":
            return "grpo"
        root = free_root(our_key)
        if root is not None:
            return None
        if our_key.startswith("algo."):
            return getattr(_algorithm(self.algo), our_key.removeprefix("algo."))
        return default_of(known_keys()[our_key])

    def report(self, key: str, verdict: str, note: str, *our_keys: str) -> None:
        """Add a row for ``key`` if the job sets it; a later call adds our keys and a note to the row but keeps its verdict."""
        if not self.has(key):
            return
        setting = self.settings[key]
        if key in self.reported:
            at = max(  # the last, as the same line may give the key an earlier value
                i for i, row in enumerate(self.rows) if row.flag == setting.name and row.file_line == setting.file_line
            )
            row = self.rows[at]
            notes = "; ".join(dict.fromkeys(text for text in (row.note, note) if text))
            self.rows[at] = Row(row.flag, row.value_text, row.file_line, row.verdict, (*row.keys, *our_keys), notes)
            return
        self.reported.add(key)
        self.rows.append(Row(setting.name, setting.text, setting.file_line, verdict, tuple(our_keys), note))

    def report_needed(self) -> None:
        """Add a row for each setting whose value was read but is unknown.

        The row says how to give the value, and replaces any other row of the setting.
        """
        for setting in [setting for key, setting in self.settings.items() if key in self.needed]:
            note = f"{setting.problem}; add {setting.name}=VALUE or --drop={setting.name} to the command line"
            row = Row(setting.name, setting.text, setting.file_line, "needed", note=note)
            self.rows = [item for item in self.rows if (item.flag, item.file_line) != (row.flag, row.file_line)] + [row]

    def leave_out(self, note: str, *keys: str) -> None:
        """Add a row with the verdict ``dropped`` for each of ``keys`` that the job sets and that has no row yet."""
        for key in keys:
            if key not in self.reported:
                self.report(key, "dropped", note)

    def refuse(self, key: str, note: str, alternatives: Sequence[str] = ()) -> None:
        """Add a row that refuses ``key``; if the user set one of our keys in ``alternatives``, report that it replaces ``key``.

        If the job does not set ``key``, the row refuses verl's default, unless ``--drop`` names ``key``. A row that ``key``
        already has keeps its verdict.
        """
        if user_keys := [name for name in alternatives if name in self.user_overrides]:
            self.set_by_user(key, user_keys)
            return
        note += "".join(f", --with {name}=..." for name in alternatives[:1])
        if self.has(key):
            self.report(key, "refused", note)
        elif key not in self.drop and key not in self.reported:
            self.reported.add(key)
            text = "" if VALUES.get(key) is None else str(VALUES[key])
            self.rows.append(Row(key, text, "", "refused", (), f"verl's default; {note}"))

    def set_by_user(self, key: str, our_keys: Iterable[str]) -> None:
        """Report that ``our_keys``, which the user set, replace ``key``."""
        self.report(key, "mapped", "by --with", *our_keys)


def _number(value: object) -> float | None:
    """Return ``value`` if it is a number, but not a bool, from -``MAX_NUMBER`` to ``MAX_NUMBER``; else None."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    return value if abs(value) <= MAX_NUMBER else None


def _text(value: object) -> str | None:
    """Return ``value`` as text if it is a text or a number, but not a bool; else None."""
    return str(value) if isinstance(value, (str, int, float)) and not isinstance(value, bool) else None
