"""Frames of the live view on a terminal, as the documentation shows them."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from slime_like.errors import DeadlineExceeded
from slime_like.util.deadline import FACTOR_VARIABLE
from tests.report.terminal import frames, on_terminal, write_page

DRAWS = """
import sys
from rich.console import Console
from slime_like.metrics.view import LiveConsole
view = LiveConsole(Console(file=sys.stdout), 0, 9)
print("before")
view.log(1, {"rollout/raw_reward": 0.25, "eval/[red]sums": 0.5, "perf/train_time": 3.0}, {})
view.note("control: save: seen")
view.note("control: save: done")
view.close()
"""


def test_every_redraw_of_the_live_view_is_a_frame(tmp_path: Path) -> None:
    reads: list[int] = []
    command = [sys.executable, "-c", DRAWS]
    code, output = on_terminal(command, os.environ | {"TERM": "xterm-256color"}, lambda: reads.append(1))
    assert code == 0 and reads
    drawn_frames = frames(output)
    assert [("seen" in frame, "done" in frame) for frame in drawn_frames[:2]] == [(True, False), (True, True)]
    assert (
        "control: save: done" in drawn_frames[-1]
        and "1/9" in drawn_frames[-1]
        and "eval/[red]sums: 0.500" in drawn_frames[-1]
    )
    assert not any("\x1b[2K" in frame or "\r" in frame for frame in drawn_frames)
    write_page(drawn_frames[-1], tmp_path / "live.html")
    html = (tmp_path / "live.html").read_text()
    assert "control: save: done" in html and "http" not in html and "url(" not in html


@pytest.mark.parametrize(
    "program", ["import time; time.sleep(60)", "print('a', flush=True); import time; time.sleep(60)"]
)
def test_a_program_that_does_not_end_is_killed(program: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(FACTOR_VARIABLE, "1")
    with pytest.raises(DeadlineExceeded, match="the terminal waited"):
        on_terminal([sys.executable, "-S", "-c", program], os.environ, lambda: None, limit_s=0.5)
