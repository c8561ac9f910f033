"""Benchmark of the columnar store: a table per form of appends; containers with different bytes end it."""

from __future__ import annotations

import importlib
import re
import sys
from collections.abc import Callable
from types import FrameType
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


def lines_per_step(container: Callable[..., Any], samples: int) -> float:
    """Return the lines of Python that ``container`` executes per step, without those of its start and end."""
    counts: list[int] = []
    for num_steps in (64, 128):
        count = 0

        def trace(frame: FrameType, event: str, arg: object) -> Any:
            nonlocal count
            count += event == "line"
            return trace

        steps = store._random_steps(samples, num_steps, num_steps)
        sys.settrace(trace)
        try:
            container(store.context_columns(store.np.arange(16)), samples, steps)
        finally:
            sys.settrace(None)
        counts.append(count)
    return (counts[1] - counts[0]) / 64


def test_an_append_to_all_samples_takes_less_work_of_the_interpreter_than_one_per_sample() -> None:
    """The number of executed Python lines explains why ``append_batch`` is faster than arrays written sample by sample."""
    batched, arrays = (lines_per_step(container, 256) for container in (store.batched, store.arrays))
    assert 0 < 8 * batched < arrays


def test_other_bytes_end_the_benchmark(monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong(*args: Any) -> list[TokenColumns]:
        return [columns.slice(1, len(columns)) for columns in store.lists(*args)]

    monkeypatch.setitem(store.CONTAINERS, "store, `append_batch`", wrong)
    with pytest.raises(SystemExit, match="differ from the lists"):
        store.main(SMALL)
