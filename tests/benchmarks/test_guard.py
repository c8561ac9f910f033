"""The benchmark of the wrapper: its simulation is what docs/guard.md shows, and what it measures is of the size told there."""

from __future__ import annotations

import importlib
from typing import Any

import pytest

from tests.scripts.shell import ROOT

guard: Any = importlib.import_module("benchmarks.guard")
PAGE = (ROOT / "docs" / "guard.md").read_text()
LOOSE = 10  # times what the page says: a busy machine is slower, and what it does meanwhile is counted too
BOUND_US = {"off": 0.1, "never": 1.0, "auto": 2.0, "never, in Python": 3.0}  # for each wrapped call


def rows(text: str) -> dict[str, dict[str, str]]:
    """First cell of each row of a table -> its others by their heads; of two with one head the last: of the quickest rounds."""
    lines = [line.strip("| ").split(" | ") for line in text.splitlines() if line.startswith("| ")]
    head = lines[0]
    return {line[0]: dict(zip(head, line, strict=True)) for line in lines[1:]}


def test_the_simulation_is_the_one_of_the_page(capsys: pytest.CaptureFixture[str]) -> None:
    guard.main(["simulate"])
    output = capsys.readouterr().out
    assert f"1888 collectives of 100 us, 8 s of computation and 8 ms per query; {guard.STEPS} steps" in output
    assert output[output.index("| guard |") :] in PAGE
    by_guard = rows(output)
    queries = {preset: float(row["queries per step"]) for preset, row in by_guard.items()}
    assert queries["off"] == 0.0 < queries["auto"] < queries["slime"] < queries["always"] == 1888.0
    seconds = {preset: float(row["step time, s"]) for preset, row in by_guard.items()}
    assert seconds["off"] <= seconds["auto"] < seconds["slime"] < seconds["always"]
    assert float(by_guard["auto"]["share"].rstrip("%")) <= 0.1


def test_what_it_costs_is_of_the_size_told(capsys: pytest.CaptureFixture[str]) -> None:
    guard.main(["cost", "--rounds", "20"])
    printed, page = rows(capsys.readouterr().out), rows(PAGE[PAGE.index("| op | wrapped calls |") :].split("\n\n")[0])
    calls = {op: row["wrapped calls"] for op, row in printed.items()}
    assert calls == {op: row["wrapped calls"] for op, row in page.items()}
    assert printed["all_reduce"].keys() == page["all_reduce"].keys()
    for op, row in printed.items():
        for arm, bound in BOUND_US.items():
            assert float(row[f"{arm}, over raw"]) <= LOOSE * bound * int(calls[op]), f"{op}: {arm}"
