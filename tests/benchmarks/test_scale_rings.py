"""Rings of simulated ranks of ``benchmarks/scale.py``: the report names the rank that does not arrive."""

from __future__ import annotations

import importlib
from typing import Any

import pytest

scale: Any = importlib.import_module("benchmarks.scale")
scale_rings: Any = importlib.import_module("benchmarks.scale_rings")


def test_the_late_rank_of_a_node_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert scale.main(["--rings", "8", "16", "--rounds", "1"]) == 0
    rows = [
        line.strip("|").split("|")
        for line in capsys.readouterr().out.splitlines()
        if line.startswith(("| 8 ", "| 16 "))
    ]
    assert [int(row[4]) for row in rows] == [8, 16] and min(float(cell) for row in rows for cell in row[:4]) > 0


def test_a_report_that_names_no_rank_ends_the_benchmark(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scale_rings, "findings", lambda _: [])
    with pytest.raises(AssertionError):
        scale_rings.measure(8, 1)
