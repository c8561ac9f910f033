"""Data of the tool job: sums that the model cannot do, and demonstrations that mostly guess instead of using the calculator.

``475+386=`` is ``861``. Three of four demonstrations answer ``475``, the first number. One of four calls the calculator of
``examples.calculator``, and further ones show how to repeat its result. A model warmed up on them can call it
and mostly does not; a reward that is only right or wrong is enough to make it call every time.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from slime_like.quickstart.arithmetic import Addition

TOKENS = ("<calc>", "</calc>", "<result>", "</result>")


@dataclass(frozen=True, slots=True)
class ToolSpec:
    """Sizes and probabilities. Part of the cache's key: another value makes other files."""

    num_train: int = 4000
    num_heldout: int = 300
    num_demonstrations: int = 40_000
    calls: float = 0.25  # share of first turns that call the calculator
    seconds: float = 0.2  # share of demonstrations that show the second turn
    seed: int = 1

    def write(self, folder: Path) -> None:
        """Write ``train.jsonl``, ``heldout.jsonl`` and ``sft.jsonl`` in slime's format."""
        train, heldout = split(self)
        _write(folder / "train.jsonl", ((s.text, s.answer) for s in train))
        _write(folder / "heldout.jsonl", ((s.text, s.answer) for s in heldout))
        _write(folder / "sft.jsonl", demonstrations(train, self))


@dataclass(frozen=True, slots=True, order=True)
class LongSum(Addition):
    """Two numbers and their sum of three digits each. Example: ``LongSum(475, 386)``: answer 861, guess 475."""

    @property
    def guess(self) -> str:
        """A wrong answer: the first number."""
        return str(self.a)

    @property
    def call(self) -> str:
        """The tool call, at whose end the engine stops."""
        return f"<calc>{self.a}+{self.b}</calc>"

    @property
    def result(self) -> str:
        """The calculator's reply."""
        return f"<result>{self.answer}</result>"


def split(spec: ToolSpec) -> tuple[list[LongSum], list[LongSum]]:
    """Return training and held-out sums, disjoint."""
    rng = random.Random(spec.seed)
    num_sums = spec.num_train + spec.num_heldout
    unique: set[LongSum] = set()
    while len(unique) < num_sums:
        a = rng.randrange(100, 900)
        unique.add(LongSum(a, rng.randrange(100, 1000 - a)))
    sums = sorted(unique)
    rng.shuffle(sums)
    return sums[spec.num_heldout :], sums[: spec.num_heldout]


def demonstrations(sums: list[LongSum], spec: ToolSpec) -> list[tuple[str, str]]:
    """Return (prompt, response) pairs for the warm start. Calculator replies are part of prompts, so they are not learnt."""
    rng = random.Random(spec.seed + 1)
    rows: list[tuple[str, str]] = []
    for problem in rng.choices(sums, k=spec.num_demonstrations):
        if rng.random() < spec.seconds:
            rows.append((problem.text + problem.call + problem.result, problem.answer))
        else:
            rows.append((problem.text, problem.call if rng.random() < spec.calls else problem.guess))
    return rows


def _write(path: Path, rows: Iterable[tuple[str, str]]) -> None:
    path.write_text("".join(json.dumps({"prompt": prompt, "label": label}) + "\n" for prompt, label in rows))
