"""A job of verl while it is translated: its settings, our overrides so far, and a row for each setting."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

from slime_like.config.schema.known import ALGORITHMS, default_of, format_value, free_root, known_keys
from slime_like.config.schema.render import render
from slime_like.errors import ConfigError
from slime_like_compat.conversion_rows import Row
from slime_like_compat.verl.defaults import VALUES
from slime_like_compat.verl.names import canonical

LARGEST = 1e300


@dataclass(frozen=True, slots=True)
class Setting:
    """One ``key=value`` of a verl job."""

    name: str  # as written
    value: Any
    text: str  # of the value, as written
    file_line: str
    problem: str = ""

    @property
    def key(self) -> str:
        """Name of the key in the tables."""
        return canonical(self.name)


@dataclass(slots=True)
class Job:
    """Settings by key, and a report row for each. ``user_overrides`` are keys of ours that the user gave, with their text."""

    settings: dict[str, Setting]
    drop: frozenset[str]
    user_overrides: dict[str, str]
    algo: str = "grpo"
    overrides: dict[str, str] = field(default_factory=dict[str, str])
    rows: list[Row] = field(default_factory=list[Row])
    reported: set[str] = field(default_factory=set[str])
    needed: set[str] = field(default_factory=set[str])  # keys that were read and whose value is not known

    def has(self, key: str) -> bool:
        """Return whether the job sets ``key`` and the user did not drop it."""
        return key in self.settings and self.settings[key].name not in self.drop

    def dropped(self, key: str) -> bool:
        """Return whether the user dropped ``key``."""
        return key in self.drop or (key in self.settings and not self.has(key))

    def value(self, key: str) -> Any:
        """Return the value of ``key``: the job's, or else verl's default; a value that is not known is noted as needed."""
        if not self.has(key):
            return VALUES[key]
        setting = self.settings[key]
        if setting.problem:
            self.needed.add(key)
            return VALUES.get(key)
        return setting.value

    def sets(self, key: str) -> bool:
        """Return whether the job sets ``key``, to something else than null."""
        return self.has(key) and self.value(key) is not None

    def number(self, key: str) -> float:
        """Return the value of ``key`` as a finite number."""
        value = self.value(key)
        if self._stands_in(key, value):
            return 1
        if (number := _number(value)) is None:
            raise self.wrong(key, "is no number")
        return number

    def whole(self, key: str) -> int:
        """Return the value of ``key`` as a whole number."""
        value = self.number(key)
        if value != int(value):
            raise self.wrong(key, "is no whole number")
        return int(value)

    def count(self, key: str) -> int:
        """Return the value of ``key`` as a whole number above 0."""
        value = self.whole(key)
        if value < 1:
            raise self.wrong(key, "must be 1 or more")
        return value

    def pair(self, key: str) -> tuple[float, float]:
        """Return the value of ``key`` as two numbers."""
        value = self.value(key)
        if self._stands_in(key, value):
            return 0.5, 0.5
        items = cast("list[object]", value) if isinstance(value, list) else []
        match [_number(item) for item in items]:
            case [float() | int() as first, float() | int() as second]:
                return float(first), float(second)
            case _:
                raise self.wrong(key, "is no pair of numbers, as in [0.9,0.999]")

    def switch(self, key: str) -> bool:
        """Return the value of ``key`` as true or false; null is false."""
        value = self.value(key)
        if value in (None, 0, 1) and not isinstance(value, float):
            return bool(value)
        raise self.wrong(key, "is neither true nor false")

    def text(self, key: str) -> str:
        """Return the value of ``key`` as text: a name, a path or a number."""
        value = self.value(key)
        if self._stands_in(key, value):
            return ""
        if (text := _text(value)) is None:
            raise self.wrong(key, "is no text")
        return text

    def texts(self, key: str) -> list[str]:
        """Return the value of ``key`` as a list of texts; one text is a list of one, null is an empty one."""
        value = self.value(key)
        items = cast("list[object]", value) if isinstance(value, list) else [] if value is None else [value]
        texts = [text for item in items if (text := _text(item)) is not None]
        if len(texts) < len(items):
            raise self.wrong(key, "is neither text nor a list of texts")
        return texts

    def _stands_in(self, key: str, value: object) -> bool:
        """Return whether ``value`` stands for one that is not known, so that no recipe is written."""
        return value is None and key in self.needed

    def wrong(self, key: str, reason: str) -> ConfigError:
        """Return an error that names a setting and its place."""
        setting = self.settings.get(key)
        if setting is None:
            return ConfigError(f"{key}={VALUES.get(key)!r} (verl's default) {reason}")
        return ConfigError(
            f"{setting.file_line}: {setting.name}={setting.text} {reason}; --drop {setting.name} leaves it out"
        )

    def needs(self, key: str, other_key: str, example: object) -> ConfigError:
        """Return the error about ``key``, which verl takes only together with ``other``."""
        state = "null" if self.has(other_key) else "not given"
        return self.wrong(key, f"needs {other_key}, which is {state}: give {other_key}={format_value(example)}")

    def set(self, our_key: str, value: Any, key: str, note: str = "") -> None:
        """Set our key ``ours`` because of verl's ``key``; a default of verl that is ours as well is not written."""
        try:
            json.dumps(value, allow_nan=False)
        except (TypeError, ValueError, RecursionError) as error:
            raise self.wrong(key, "contains a value that JSON cannot represent") from error
        is_set = self.has(key)
        if (
            not is_set
            and value == self.default(our_key)
            and isinstance(value, bool) == isinstance(self.default(our_key), bool)
        ):
            return
        if our_key not in self.user_overrides:
            self.overrides[our_key] = render(value)
        if is_set:
            self.tell(key, "mapped", note, our_key)
        else:
            text = "" if VALUES.get(key) is None else str(VALUES[key])
            self.rows.append(
                Row(key, text, "", "default", (our_key,), note or "verl's default is written into the recipe")
            )

    def default(self, our_key: str) -> Any:
        """Return the default of one of our keys under the job's algorithm."""
        if our_key == "algo":
            return "grpo"
        root = free_root(our_key)
        if root is not None:
            return None
        if our_key.startswith("algo."):
            return getattr(ALGORITHMS[self.algo](), our_key.removeprefix("algo."))
        return default_of(known_keys()[our_key])

    def tell(self, key: str, verdict: str, note: str, *our_keys: str) -> None:
        """Report the verdict on ``key`` if the job sets it; the first verdict counts, further keys of ours are added."""
        if not self.has(key):
            return
        setting = self.settings[key]
        if key in self.reported:
            at = next(
                i for i, row in enumerate(self.rows) if row.flag == setting.name and row.file_line == setting.file_line
            )
            row = self.rows[at]
            notes = "; ".join(dict.fromkeys(text for text in (row.note, note) if text))
            self.rows[at] = Row(row.flag, row.value_text, row.file_line, row.verdict, (*row.keys, *our_keys), notes)
            return
        self.reported.add(key)
        self.rows.append(Row(setting.name, setting.text, setting.file_line, verdict, tuple(our_keys), note))

    def ask(self) -> None:
        """Replace the row of every value that is needed and not known by one that says how to give it."""
        for setting in [setting for key, setting in self.settings.items() if key in self.needed]:
            note = f"{setting.problem}; give {setting.name}=VALUE behind the job, or --drop={setting.name}"
            row = Row(setting.name, setting.text, setting.file_line, "needed", note=note)
            self.rows = [item for item in self.rows if (item.flag, item.file_line) != (row.flag, row.file_line)] + [row]

    def leave(self, note: str, *keys: str) -> None:
        """Leave settings out that have no effect on what is trained, unless something was said of them already."""
        for key in keys:
            if key not in self.reported:
                self.tell(key, "dropped", note)

    def refuse(self, key: str, note: str, settles: Sequence[str] = ()) -> None:
        """Refuse a setting that carries meaning, unless the user gave one of the keys of ours that ``settles`` it."""
        if answer := [name for name in settles if name in self.user_overrides]:
            self.settle(key, answer)
            return
        note += "".join(f", --with {name}=..." for name in settles[:1])
        if self.has(key):
            self.tell(key, "refused", note)
        elif key not in self.drop and key not in self.reported:
            self.reported.add(key)
            text = "" if VALUES.get(key) is None else str(VALUES[key])
            self.rows.append(Row(key, text, "", "refused", (), f"verl's default; {note}"))

    def settle(self, key: str, our_keys: Iterable[str]) -> None:
        """Report that keys of ours which the user gave answer ``key``."""
        self.tell(key, "mapped", "by --with", *our_keys)


def _number(value: object) -> float | None:
    """Return ``value`` where it is a finite number that a float can hold."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    return value if abs(value) <= LARGEST else None


def _text(value: object) -> str | None:
    """Return ``value`` as text where it is text or a number."""
    return str(value) if isinstance(value, (str, int, float)) and not isinstance(value, bool) else None
