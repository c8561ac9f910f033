"""Comparison of two runs: first differing step of each metric, differing config keys, and malformed run folders."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slime_like.errors import DataError
from slime_like.report.comparison import MISSING, compare, differs
from slime_like.report.comparison_view import html_page, spark
from slime_like.report.record import read_record
from tests.report.pages import check_self_contained

ROOT = Path(__file__).parents[2]
HOSTILE = "<script>alert(1)</script>"


def write_run(folder: Path, rows: list[dict[str, float]], config: str = "run: {name: a}\n") -> Path:
    folder.mkdir(parents=True)
    lines = [
        json.dumps({"step": step, "time": 1.0, **row, "spans": {"train": [0, 1]}}) for step, row in enumerate(rows)
    ]
    (folder / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    (folder / "config.yaml").write_text(config)
    return folder


def test_the_first_difference_of_each_metric(tmp_path: Path) -> None:
    rows_a = [{"train/loss": 1.0, "train/lr": 0.1, "rollout/raw_reward": 0.5, "perf/step_time": 1.0} for _ in range(5)]
    rows_b = [dict(row, **{"perf/step_time": 9.0}) for row in rows_a]
    rows_b[3]["train/loss"] = 1.0 + 1e-7
    rows_b[2]["rollout/raw_reward"] = math.nan
    a = read_record(write_run(tmp_path / "a", rows_a, "optim: {lr: 1.0, beta1: 0.9}\nrun: {name: a}\n"))
    b = read_record(write_run(tmp_path / "b", rows_b, "optim: {lr: 2.0, beta1: 0.9, new: []}\nrun: {name: b}\n"))
    with_tolerance = compare(a, b, relative=1e-6, absolute=0.0)
    assert {m.metric: m.step for m in with_tolerance.metrics} == {
        "train/loss": None,
        "train/lr": None,
        "rollout/raw_reward": 2,
    }
    assert with_tolerance.first is not None and with_tolerance.first.metric == "rollout/raw_reward"
    without_tolerance = compare(a, b, relative=0.0, absolute=0.0, times=True)
    assert {m.metric: m.step for m in without_tolerance.metrics if m.step is not None} == {
        "perf/step_time": 0,
        "rollout/raw_reward": 2,
        "train/loss": 3,
    }
    assert without_tolerance.config == (("optim.lr", 1.0, 2.0), ("run.name", "a", "b"), ("optim.new", MISSING, []))


def test_runs_of_different_length_are_compared_on_common_steps(tmp_path: Path) -> None:
    a = read_record(write_run(tmp_path / "a", [{"x": 1.0}] * 4))
    b = read_record(write_run(tmp_path / "b", [{"x": 1.0, "y": 2.0}] * 2))
    comparison = compare(a, b, relative=0.0, absolute=0.0)
    assert (comparison.metrics[0].num_common, comparison.first, comparison.only) == (2, None, ((), ("y",)))


@given(st.floats(), st.floats(), st.floats(0, 1), st.floats(0, 1))
def test_the_tolerance(a: float, b: float, relative: float, absolute: float) -> None:
    assert differs(a, b, relative, absolute) == differs(b, a, relative, absolute)
    assert not differs(a, a, 0.0, 0.0)
    if a != b and math.isfinite(a) and math.isfinite(b):
        assert differs(a, b, 0.0, 0.0) or a - b == 0


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (None, ["has no metrics.jsonl", "run.dir"]),
        ("", ["no complete line"]),
        ('{"step": 1}\nnot json\n{"step": 2}\n', ["metrics.jsonl:2", "remove it"]),
        ('{"step": 1, "x": "high"}\n', ["metrics.jsonl:1", "'x' is 'high'"]),
        ('{"x": 1}\n', ["metrics.jsonl:1", "step"]),
        ('{"step": null}\n', ["metrics.jsonl:1", "'step' is None"]),
        ('{"step": 1, "spans": {"a": [1]}}\n', ["metrics.jsonl:1"]),
        ("[1]\n", ["metrics.jsonl:1"]),
        ('{"step": 1', ["no complete line"]),
    ],
)
def test_folders_that_are_not_runs(text: str | None, words: list[str], tmp_path: Path) -> None:
    if text is not None:
        (tmp_path / "metrics.jsonl").write_text(text)
    with pytest.raises(DataError) as error:
        read_record(tmp_path)
    assert all(word in str(error.value) for word in words), error.value


def test_an_incomplete_last_line_is_dropped_with_a_note(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "a", [{"x": 1.0}] * 2)
    with (folder / "metrics.jsonl").open("a") as file:
        file.write('{"step": 2, "x": 1.')
    (folder / "config.yaml").unlink()
    record = read_record(folder)
    assert record.curve("x") == [(0, 1.0), (1, 1.0)]
    assert "incomplete" in record.notes[0] and "config.yaml is missing" in record.notes[1]
    (folder / "config.yaml").write_text("a: [")
    with pytest.raises(DataError, match=r"config\.yaml cannot be read as YAML"):
        read_record(folder)


def test_blank_lines_are_skipped(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "a", [{"x": 1.0}] * 2)
    first, second = (folder / "metrics.jsonl").read_text().splitlines()
    (folder / "metrics.jsonl").write_text(f"\n{first}\n \n{second}\n\n")
    record = read_record(folder)
    assert record.curve("x") == [(0, 1.0), (1, 1.0)]
    assert record.notes == ()


def test_the_page_is_self_contained_and_escapes_run_names(tmp_path: Path) -> None:
    a = read_record(
        write_run(tmp_path / "a", [{HOSTILE: float(n), "flat": 1.0} for n in range(3)], f"run: {{name: '{HOSTILE}'}}\n")
    )
    b = read_record(write_run(tmp_path / "b", [{HOSTILE: math.inf, "flat": 1.0}] * 3))
    html = html_page(compare(a, b, relative=0.0, absolute=0.0), [])
    page = check_self_contained(html)
    assert page.tags.count("polyline") == 3
    assert HOSTILE in "".join(page.text)


def test_curves_in_one_line_of_text() -> None:
    assert spark([0, 1, 2, 3], 0, 3) == "▁▃▆█"
    assert spark([1, math.nan, 1], 1, 1) == "▁·▁"
    assert len(spark(list(range(1000)), 0, 999)) == 24


def test_the_command(tmp_path: Path) -> None:
    a = write_run(tmp_path / "a", [{"train/loss": 1.0, "train/lr": 1.0}] * 2)
    b = write_run(tmp_path / "b", [{"train/loss": 1.0, "train/lr": 1.0}, {"train/loss": 2.0, "train/lr": 1.0}])
    page = tmp_path / "out" / "c.html"

    def run(*argv: object) -> subprocess.CompletedProcess[str]:
        line = [sys.executable, "scripts/compare.py", *map(str, argv)]
        return subprocess.run(line, cwd=ROOT, capture_output=True, text=True, check=False)

    result = run(a, b, "--html", page)
    assert (result.returncode, page.is_file()) == (1, True), result.stderr
    assert "first difference at step 1: train/loss" in result.stdout
    assert run(a, b, "--metrics", "train/lr").returncode == 0
    later = write_run(tmp_path / "later", [{"train/lr": 1.0}, {"train/lr": 1.0}, {"train/loss": 1.0}])
    result = run(a, later, "--metrics", "train/loss")
    assert result.returncode == 2 and "no metric has a value of both runs at the same step" in result.stderr
    result = run(a, tmp_path / "none")
    assert result.returncode == 2 and "is not a folder" in result.stderr
