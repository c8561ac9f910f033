"""Translated job of another project: a report row for each of its settings, and the equivalent overrides."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from slime_like.config.schema.root import TrainConfig

VERDICTS = {
    "mapped": "mapped to a key with the same meaning",
    "always": "always done here, no key",
    "default": "not given, and the defaults of the two projects differ",
    "code": "your code, named in the recipe: port it to this project's signature; no run starts until it can be imported",
    "dropped": "left out, with the reason: the job is the same without it",
    "refused": "changes the job and has no equivalent here",
    "needed": "its value is not known from the script",
    "unknown": "unknown to both projects",
}
ESSENTIAL = frozenset({"--hf-checkpoint", "--prompt-data", "actor_rollout_ref.model.path"})
"""Settings that every job needs; ``--drop`` is not suggested for them."""
BLOCKING = ("refused", "needed", "unknown")
"""Verdicts that block a recipe, because it would describe a different job."""

MAX_ENGINE_MEMORY = 0.5
"""Share of a GPU's memory above which an engine leaves too little for a trainer on the same GPU."""
ENGINE_MEMORY_NOTE = (
    "trainer and engines both stay on the GPUs here: lower this setting to the memory that train.py --plan leaves"
)


@dataclass(frozen=True, slots=True)
class Row:
    """Report row of one setting."""

    flag: str  # name as written in the job: ``--lr`` in slime, ``actor.optim.lr`` in verl
    value_text: str  # values as written in the job
    file_line: str  # file:line; empty for a setting that the job does not contain
    verdict: str  # a key of VERDICTS
    keys: tuple[str, ...] = ()
    note: str = ""

    def text(self, values: dict[str, Any]) -> str:
        """Return ``key=value`` for each recipe key that this row sets; ``values`` maps all keys of the recipe to values.

        If ``values`` is empty, return the row's keys alone.
        """
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
    """Job of another project, translated to our keys."""

    rows: tuple[Row, ...]
    overrides: tuple[str, ...]
    config: TrainConfig | None  # composed from the overrides; None if a row blocks a recipe

    def rows_with(self, verdicts: Sequence[str]) -> tuple[Row, ...]:
        """Return the rows with one of ``verdicts``."""
        return tuple(row for row in self.rows if row.verdict in verdicts)

    @property
    def blocked(self) -> tuple[Row, ...]:
        """Rows with a verdict in ``BLOCKING``. If there are any, no recipe is written."""
        return self.rows_with(BLOCKING)


def refusal_message(rows: Sequence[Row]) -> str:
    """Return the error message for ``rows`` that prevent a recipe. It suggests ``--drop`` for flags not in ``ESSENTIAL``."""
    lines = [f"  {row.flag} {row.value_text}".rstrip() + f": {row.verdict}; {row.note}" for row in rows]
    flags = dict.fromkeys(row.flag for row in rows)
    drops = " ".join(f"--drop={flag}" for flag in flags if flag not in ESSENTIAL)
    if drops:
        settings = "the others" if ESSENTIAL & flags.keys() else "them"
        lines.append(f"To convert the job without {settings}, add: {drops}")
    return "\n".join(["no recipe is written, because it would describe a different job:", *lines])


def same_value(a: object, b: object) -> bool:
    """Return whether two values of a key are equal; ``True`` and 1 differ."""
    return a == b and isinstance(a, bool) == isinstance(b, bool)
