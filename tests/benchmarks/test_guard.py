"""Benchmark of the wrapper: docs/guard.md shows its simulation, and the wrapper's calls per op stay within bounds."""

from __future__ import annotations

import importlib
import sys
from dataclasses import replace
from types import FrameType
from typing import Any

import pytest

from slime_like.distributed.wrapper import hot, install
from tests.scripts.shell import ROOT

guard: Any = importlib.import_module("benchmarks.guard")
PAGE = (ROOT / "docs" / "guard.md").read_text()
# Python calls for each wrapped call: calls of the wrapper's functions, and calls of C functions from them.
MAX_CALLS = {"off": 0, "never": 0, "auto": 0, "never, in Python": 11}


def rows(text: str) -> dict[str, dict[str, str]]:
    """Return {first cell of a row: {column head: cell}}. Of columns with the same head, the last one counts."""
    lines = [line.strip("| ").split(" | ") for line in text.splitlines() if line.startswith("| ")]
    head = lines[0]
    return {line[0]: dict(zip(head, line, strict=True)) for line in lines[1:]}


def test_the_page_shows_the_simulation(capsys: pytest.CaptureFixture[str]) -> None:
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


def test_the_cost_table_has_the_rows_of_the_page(capsys: pytest.CaptureFixture[str]) -> None:
    guard.main(["cost", "--rounds", "1"])
    printed, page = rows(capsys.readouterr().out), rows(PAGE[PAGE.index("| op | wrapped calls |") :].split("\n\n")[0])
    num_wrapped_calls = {op: row["wrapped calls"] for op, row in printed.items()}
    assert num_wrapped_calls == {op: row["wrapped calls"] for op, row in page.items()}
    assert printed["all_reduce"].keys() == page["all_reduce"].keys()


def count_calls(run: Any) -> int:
    """Return the number of Python functions of the wrapper that ``run`` calls, plus functions in C that these call."""
    count = 0

    def profile(frame: FrameType, event: str, arg: object) -> None:
        nonlocal count
        count += event in ("call", "c_call") and "slime_like/distributed" in frame.f_code.co_filename

    sys.setprofile(profile)
    try:
        run()
    finally:
        sys.setprofile(None)
    return count


@pytest.mark.parametrize("arm", MAX_CALLS)
def test_calls_of_the_wrapper_per_op_are_bounded(arm: str) -> None:
    """Calls are counted, because times depend on the machine's other work."""
    spec, in_c = guard.ARMS[arm]
    if in_c and spec.wrap and hot.load() is None:
        pytest.skip("no C compiler, or no headers of this Python")
    # With this budget, the first op is the only one with a memory query.
    spec = replace(spec, default=replace(spec.default, budget=1e-12))
    with guard.world():
        ops = guard.ops()
        num_wrapped_calls = {name: guard.wrapped_calls(op) for name, op in ops.items()}
        install.install(spec, guard.CPU, 0, in_c=in_c)
        try:
            for name, op in ops.items():
                op()
                assert count_calls(op) <= MAX_CALLS[arm] * num_wrapped_calls[name], name
        finally:
            install.remove()
