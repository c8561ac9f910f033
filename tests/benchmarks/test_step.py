"""Benchmark of a training step, in its smallest form: both arms train, and arms that disagree end the script."""

from __future__ import annotations

import importlib
import re
from pathlib import Path
from typing import Any

import pytest
import torch

FIGURES = r" (\d+\.\d+) \((\d+\.\d+)\) \|"


@pytest.fixture(scope="module")
def step() -> Any:
    """Return the benchmark's module, whose imports take seconds."""
    return importlib.import_module("benchmarks.step")


@pytest.mark.ranks
def test_a_case_becomes_a_row(step: Any, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "step.md"
    argv = ["--tables", "steps", "--cases", "tiny,float32,1", "--rounds", "1", "--sequences", "4", "--output", str(out)]
    assert step.main(argv) == 0
    text = out.read_text()
    assert text in capfd.readouterr().out
    assert f"Command: `python benchmarks/step.py {' '.join(argv)}`" in text and "megatron-core" in text
    match = re.search(r"\| tiny, float32, 1 \|" + 3 * FIGURES, text)
    assert match is not None
    plain, _, fused, _, ratio, _ = map(float, match.groups())
    assert plain > 0 and ratio == pytest.approx(plain / fused, rel=0.1)


def test_gradients_that_differ_end_the_script(step: Any) -> None:
    case = step.Case.of("tiny,float32,1")
    step.check(case, {"torch": 1.0, "c": 1.00005})
    for norm in (1.01, float("nan")):
        with pytest.raises(SystemExit, match=r"differ by more than 0\.0001"):
            step.check(case, {"torch": 1.0, "c": norm})


@pytest.mark.parametrize("part", ["attention", "scores"])
def test_arms_of_a_part_take_turns(step: Any, part: str) -> None:
    attention = part == "attention"
    arms = (
        step.attention(3, 7, step.SHAPES["tiny"]) if attention else step.scores(9, 17, 8, torch.float32, entropy=True)
    )
    calls: list[str] = []

    def run(arm: str) -> None:
        calls.append(arm)
        arms[arm]()

    times = step.alternate({arm: lambda arm=arm: run(arm) for arm in arms}, 2)
    assert calls == ["torch", "c"] * 3, "including a warm-up call of each arm"
    assert step.row(part, times, 1e3, 6).startswith(f"| {part} | ")
    assert {arm: len(pairs) for arm, pairs in times.items()} == {"torch": 2, "c": 2}
