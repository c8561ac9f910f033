"""Data of the default job: sums as text, and demonstrations that often forget the carry.

``475+6=`` is ``481``; a careless demonstration answers ``471``. A model trained on the demonstrations can add, but its most
likely answer forgets the carry. A reward of 0 or 1 is enough to unlearn this, even on held-out problems.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

FIRST = range(100, 1000)
SECOND = range(5, 10)


@dataclass(frozen=True, slots=True)
class ArithmeticSpec:
    """Sizes and probabilities of the data. They are part of the files' stamp: the files are rewritten if a value changes."""

    num_heldout: int = 300
    demonstrations_per_problem: int = 10
    careless: float = 0.7  # probability that a demonstration forgets the carry, if there is one
    seed: int = 1

    def write(self, folder: Path) -> None:
        """Write the files; see ``write_datasets``."""
        write_datasets(folder, self)


@dataclass(frozen=True, slots=True, order=True)
class Addition:
    """Problem ``a + b``, with prompt and label."""

    a: int
    b: int

    @property
    def text(self) -> str:
        """Return the prompt."""
        return f"{self.a}+{self.b}="

    @property
    def answer(self) -> str:
        """Return the label."""
        return str(self.a + self.b)


@dataclass(frozen=True, slots=True, order=True)
class Problem(Addition):
    """Problem of the default job. Example: ``Problem(475, 6)`` has text ``475+6=``, answer ``481``, careless answer ``471``."""

    @property
    def careless_answer(self) -> str:
        """Return the sum without the carry of the last digits."""
        return str(self.a // 10 * 10 + (self.a + self.b) % 10)


def split(spec: ArithmeticSpec) -> tuple[list[Problem], list[Problem]]:
    """Return disjoint training and held-out problems."""
    problems = [Problem(a, b) for a in FIRST for b in SECOND]
    random.Random(spec.seed).shuffle(problems)
    return problems[spec.num_heldout :], problems[: spec.num_heldout]


def demonstrations(problems: Iterable[Problem], spec: ArithmeticSpec) -> list[tuple[str, str]]:
    """Return shuffled (prompt, response) pairs for the warm start, several per problem."""
    rng = random.Random(spec.seed + 1)
    repeated = [problem for problem in problems for _ in range(spec.demonstrations_per_problem)]
    rng.shuffle(repeated)
    return [(p.text, p.careless_answer if rng.random() < spec.careless else p.answer) for p in repeated]


def write_datasets(folder: Path, spec: ArithmeticSpec) -> None:
    """Write ``train.jsonl``, ``heldout.jsonl`` and ``sft.jsonl`` in slime's format."""
    train, heldout = split(spec)
    _write(folder / "train.jsonl", ((p.text, p.answer) for p in train))
    _write(folder / "heldout.jsonl", ((p.text, p.answer) for p in heldout))
    _write(folder / "sft.jsonl", demonstrations(train, spec))


def _write(path: Path, rows: Iterable[tuple[str, str]]) -> None:
    path.write_text("".join(json.dumps({"prompt": prompt, "label": label}) + "\n" for prompt, label in rows))
