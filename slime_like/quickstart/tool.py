"""Data of the tool job: sums that the model cannot compute, and demonstrations that mostly guess the answer.

``475+386=`` is ``861``. Three quarters of the first-turn demonstrations answer ``475``, the first number; the others
call the calculator of ``examples.calculator``. Further demonstrations show how to repeat its result. A model trained on them
can call the calculator and mostly does not. A reward of 0 or 1 is enough to make it call the calculator every time.
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
    """Sizes and probabilities of the data. They are part of the files' stamp: the files are rewritten if a value changes."""

    num_train: int = 4000
    num_heldout: int = 300
    num_demonstrations: int = 40_000
    call_share: float = 0.25  # share of first turns that call the calculator
    second_turn_share: float = 0.2  # share of demonstrations that show the second turn
    seed: int = 1

    def write(self, folder: Path) -> None:
        """Write ``train.jsonl``, ``heldout.jsonl`` and ``sft.jsonl`` in slime's format."""
        train, heldout = split(self)
        _write(folder / "train.jsonl", ((s.text, s.answer) for s in train))
        _write(folder / "heldout.jsonl", ((s.text, s.answer) for s in heldout))
        _write(folder / "sft.jsonl", demonstrations(train, self))


@dataclass(frozen=True, slots=True, order=True)
class LongSum(Addition):
    """Three-digit sum of two three-digit numbers. Example: ``LongSum(475, 386)`` has the answer 861 and the wrong guess 475."""

    @property
    def guess(self) -> str:
        """Return the wrong answer of most demonstrations: the first number."""
        return str(self.a)

    @property
    def call(self) -> str:
        """Return the tool call. The engine stops sampling after ``</calc>``, the last token of the call."""
        return f"<calc>{self.a}+{self.b}</calc>"

    @property
    def result(self) -> str:
        """Return the reply of the calculator."""
        return f"<result>{self.answer}</result>"


def split(spec: ToolSpec) -> tuple[list[LongSum], list[LongSum]]:
    """Return disjoint training and held-out sums."""
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
        if rng.random() < spec.second_turn_share:
            rows.append((problem.text + problem.call + problem.result, problem.answer))
        else:
            rows.append((problem.text, problem.call if rng.random() < spec.call_share else problem.guess))
    return rows


def _write(path: Path, rows: Iterable[tuple[str, str]]) -> None:
    path.write_text("".join(json.dumps({"prompt": prompt, "label": label}) + "\n" for prompt, label in rows))
