"""Benchmark of the columnar store: a table per form of appends; containers with other bytes end it."""

from __future__ import annotations

import importlib
import re
from typing import Any

import pytest

from slime_like.store.columns import TokenColumns

store: Any = importlib.import_module("benchmarks.store")
SMALL = ["--samples", "8", "--tokens", "16", "--prompt", "4", "--rounds", "1"]


def test_every_container_has_a_row_in_both_tables(capsys: pytest.CaptureFixture[str]) -> None:
    assert store.main(SMALL) == 0
    rows = re.findall(r"^\| (.+) \| \d+ \| ([\d.]+) \| \d+ \|$", capsys.readouterr().out, re.M)
    assert [name for name, _ in rows] == [*store.CONTAINERS] * 2
    assert rows[0][1] == rows[len(store.CONTAINERS)][1] == "1.0"


def test_the_store_is_faster_than_appends_to_each_sample(monkeypatch: pytest.MonkeyPatch) -> None:
    """At 64 samples, by CPU time: 2.3 times is the requirement, 4.3 the measured factor."""
    names = ("store, `append_batch`", "arrays per sample, all room reserved")
    monkeypatch.setattr(store, "CONTAINERS", {name: store.CONTAINERS[name] for name in names})
    steps = store._random_steps(64, 128, 128)
    _, row = store.measure(store.context_columns(store.np.arange(16)), 64, steps, 5)
    assert float(row.split(" | ")[2]) >= 2.3


def test_other_bytes_end_the_benchmark(monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong(*args: Any) -> list[TokenColumns]:
        return [columns.slice(1, len(columns)) for columns in store.lists(*args)]

    monkeypatch.setitem(store.CONTAINERS, "store, `append_batch`", wrong)
    with pytest.raises(SystemExit, match="other bytes"):
        store.main(SMALL)
