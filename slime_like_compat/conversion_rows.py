"""A job of another project in our terms: a row for each of its settings, and the overrides that say the same here."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from slime_like.config.schema.root import TrainConfig

VERDICTS = {
    "mapped": "mapped to a key with the same meaning",
    "always": "always done here, no key",
    "default": "not given, and the defaults of the two projects differ",
    "code": "code of your own, named in the recipe: no run starts until it can be imported, ported to this project's signature",
    "dropped": "left out, with the reason: the job is the same without it",
    "refused": "changes the job and has no equivalent here",
    "needed": "its value is not in the script",
    "unknown": "unknown to both projects",
}
ESSENTIAL = frozenset({"--hf-checkpoint", "--prompt-data", "actor_rollout_ref.model.path"})
"""Settings that every job needs: dropping them is of no use."""
BLOCKING = ("refused", "needed", "unknown")
"""Verdicts without which the job would be another one: no recipe is written."""


@dataclass(frozen=True, slots=True)
class Row:
    """Report row of one setting."""

    flag: str  # as written there: ``--lr`` in slime, ``actor.optim.lr`` in verl
    value_text: str  # its values as written
    file_line: str  # file:line, empty for a setting that is not there
    verdict: str  # of VERDICTS
    keys: tuple[str, ...] = ()
    note: str = ""

    def text(self, values: dict[str, Any]) -> str:
        """Return ``key=value`` of each key that the recipe has; the keys alone if there is no recipe."""
        if not values:
            return ", ".join(self.keys)
        own_keys = [
            key
            for key in values
            if any(
                key == key_prefix or key.startswith(f"{key_prefix}.")
                for key_prefix in self.keys
                if key_prefix != "algo"
            )
        ]
        return ", ".join(f"{key}={values[key]!r}" for key in [*(["algo"] if "algo" in self.keys else []), *own_keys])


@dataclass(frozen=True, slots=True)
class Mapped:
    """A job of another project in our terms."""

    rows: tuple[Row, ...]
    overrides: tuple[str, ...]
    config: TrainConfig | None  # what they compose to; None where a row of BLOCKING blocks a recipe

    def of(self, verdicts: Sequence[str]) -> tuple[Row, ...]:
        """Return the rows with one of ``verdicts``."""
        return tuple(row for row in self.rows if row.verdict in verdicts)

    @property
    def blocked(self) -> tuple[Row, ...]:
        """Rows that block a recipe."""
        return self.of(BLOCKING)


def in_the_way(rows: Sequence[Row]) -> str:
    """Return the message about settings without which a job would be another one."""
    lines = [f"  {row.flag} {row.value_text}".rstrip() + f": {row.verdict}; {row.note}" for row in rows]
    flags = dict.fromkeys(row.flag for row in rows)
    drops = " ".join(f"--drop={flag}" for flag in flags if flag not in ESSENTIAL)
    if drops:
        them = "the others" if ESSENTIAL & flags.keys() else "them"
        lines.append(f"To convert the job without {them}, add: {drops}")
    return "\n".join(["no recipe is written, because it would be another job:", *lines])
