"""Escaping: a marker in every value of a run reaches neither page nor terminal as markup or control sequence."""

from __future__ import annotations

import io
import json
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any, cast

import numpy as np
from rich.console import Console

from scripts import control  # pyright: ignore[reportAttributeAccessIssue]  scripts is not a package
from slime_like import cli
from slime_like.cluster.run.status import ControlReply, RunStatus, write_status
from slime_like.config.load.loader import load_config
from slime_like.data.dump import rollout_path, save_groups
from slime_like.metrics.view import LiveConsole, PlainConsole
from slime_like.report.comparison import compare
from slime_like.report.comparison_view import html_page, print_comparison
from slime_like.report.record import read_record
from slime_like.report.run_page import run_page
from slime_like.report.samples import sampled_rollouts
from slime_like.types import Prompt, Reward, Sample, SampleGroup, Source, Span
from slime_like.types import Status as SampleStatus
from tests.report.pages import check_self_contained
from tests.report.test_compare import write_run

MARKER = "<x>&\"'"
BELL = "\x1b]0;x\x07\x1b[31m\x9b2J\r\u202e"
ACTING = ("\x1b", "\x07", "\x9b", "\r", "\u202e")


def with_mark(tree: Mapping[str, Any], mark: str) -> dict[str, Any]:
    """Return the tree with the mark in every value and as an additional key."""
    values = {
        name: with_mark(cast("dict[str, Any]", value), mark) if isinstance(value, dict) and value else f"{mark}{value}"
        for name, value in tree.items()
    }
    return values | {mark: mark}


def run_with(folder: Path, mark: str, values: list[float]) -> Path:
    """Write a run with the mark in every key, name and text."""
    config = with_mark(asdict(load_config(["+recipe=quickstart", "run.prepare=null"], files=False)), mark)
    names = ("rollout/raw_reward", f"eval/{mark}", f"memory/{mark}", f"rollout/{mark}", f"comm/{mark}/{mark}/calls")
    write_run(folder, [dict.fromkeys(names, value) for value in values], json.dumps(config))
    ids = np.arange(2, dtype=np.int32)
    spans = (Span(0, 1, Source.PROMPT), Span(1, 2, Source.MODEL, 0))
    logprobs = np.array([np.nan, -0.5], dtype=np.float32)
    sample = Sample(0, 0, 0, 0, ids, logprobs, spans, SampleStatus.COMPLETED, mark, Reward(1.0))
    save_groups(rollout_path(folder / "rollouts", 0), [SampleGroup(0, Prompt(0, ids[:1], mark, mark, None), (sample,))])
    return folder


def test_no_value_is_markup(tmp_path: Path) -> None:
    folders = [run_with(tmp_path / f"{name}{MARKER}", MARKER, values) for name, values in (("a", [1.0]), ("b", [2.0]))]
    a, b = map(read_record, folders)
    pages = [
        run_page(a, sampled_rollouts(folders[0] / "rollouts"), lambda ids: MARKER),
        html_page(compare(a, b, relative=0.0, absolute=0.0), []),
    ]
    for html in pages:
        assert MARKER in "".join(check_self_contained(html).text), "shown verbatim"
        assert "<x>" not in html and "<x" not in html
        assert 'aria-label="' in html and f'{MARKER}"' not in html


def test_no_value_reaches_a_terminal_raw(tmp_path: Path) -> None:
    records = [
        read_record(run_with(tmp_path / name, BELL, values)) for name, values in (("a", [1.0]), ("b", [2.0, 3.0]))
    ]
    out = io.StringIO()
    print_comparison(compare(*records, relative=0.0, absolute=0.0), [], out)
    plain_console, live_console = PlainConsole(out, 9), LiveConsole(Console(file=out), 0, 9)
    for console in (plain_console, live_console):
        console.log(1, {f"eval/{BELL}": 0.5, "rollout/raw_reward": 1.0}, {})
        console.note(f"control: {BELL}")
        console.close()
    text = out.getvalue()
    assert "\\u001b]0;x\\u0007" in text
    assert [char for char in ACTING if char in text] == []


def test_no_text_of_another_user_reaches_a_terminal_raw(tmp_path: Path, capsys: Any) -> None:
    run = tmp_path / "run"
    run.mkdir()
    write_status(run, RunStatus(1, 2, requests=(ControlReply("save", 0.0, "failed", 1, BELL, BELL),)))
    assert control.main([str(run), "status"]) == 0
    assert control.main([str(tmp_path / BELL), "status"]) == 2
    assert cli.main([f"run.{BELL}=1"]) == 2
    streams = capsys.readouterr()
    for text in streams:
        assert "\\u001b]0;x\\u0007" in text
        assert [char for char in ACTING if char in text] == []
