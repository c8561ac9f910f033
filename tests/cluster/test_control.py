"""Run control: requests as files, by signal, twice, withdrawn, unknown, of others; and the command that asks."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest

from slime_like.cluster.run.control import Control, Request
from slime_like.cluster.run.control_client import ask, wait_for_answer
from slime_like.cluster.run.status import STATUS, ControlReply, RunStatus, read_status, write_status
from slime_like.errors import DataError
from slime_like.util.deadline import Deadline

ROOT = Path(__file__).parents[2]


@pytest.fixture
def said() -> list[str]:
    return []


@pytest.fixture
def control(tmp_path: Path, said: list[str]) -> Iterator[Control]:
    made = Control(tmp_path, said.append)
    made.open(2, 9)
    yield made
    made.close()


def answers(folder: Path) -> list[tuple[str, str, int]]:
    status = read_status(folder)
    assert status is not None
    return [(answer.request, answer.state, answer.step) for answer in status.requests]


def test_a_request_is_seen_once_and_done_and_both_are_said(control: Control, said: list[str], tmp_path: Path) -> None:
    assert control.read(3) == ()
    status = read_status(tmp_path)
    assert status is not None and status.alive and (status.step, status.num_steps) == (3, 9)
    for name in ("stop", "save"):
        (control.folder / name).touch()
    assert control.read(4) == (Request.SAVE, Request.STOP), "in the order in which they are done"
    assert answers(tmp_path) == [("save", "seen", 4), ("stop", "seen", 4)]
    control.answer(Request.SAVE, "checkpoints/iter_0000004")
    control.answer(Request.STOP, "why", failed=True)
    assert control.read(5) == () and list(control.folder.iterdir()) == []
    assert answers(tmp_path) == [("save", "done", 4), ("stop", "failed", 4)]
    assert "control: save: seen" in said and "control: save: done: checkpoints/iter_0000004" in said
    assert "control: stop: failed: why" in said and len(said) == 4


def test_what_a_request_says_does_not_matter_and_twice_is_once(control: Control) -> None:
    path = control.folder / "save"
    path.write_bytes(b"\xff half a word")
    path.touch()
    ask(control.run_dir, Request.SAVE)
    os.symlink("/nowhere", control.folder / "eval")
    os.mkfifo(control.folder / "report")
    assert control.read(1) == (Request.EVAL, Request.SAVE, Request.REPORT), "and nothing was opened"
    for request in (Request.EVAL, Request.SAVE, Request.REPORT):
        control.answer(request, "")
    assert control.read(2) == ()
    path.touch()
    assert control.read(3) == (Request.SAVE,), "asked for again after it was read: done again"


def test_the_signal_is_a_save(control: Control) -> None:
    os.kill(os.getpid(), signal.SIGUSR2)
    assert control.read(1) == (Request.SAVE,)
    control.answer(Request.SAVE, "")
    assert control.read(2) == ()


def test_signals_are_given_back(tmp_path: Path) -> None:
    before = signal.getsignal(signal.SIGUSR2)
    made = Control(tmp_path, print)
    made.open(0, 1)
    assert signal.getsignal(signal.SIGUSR2) != before
    made.close()
    assert signal.getsignal(signal.SIGUSR2) == before


def test_unknown_requests_give_one_message_and_go(control: Control, said: list[str], tmp_path: Path) -> None:
    hostile = "\x1b[31m[red]" + "a" * 100
    for name in ("sav", "Save", "save~", hostile):
        (control.folder / name).touch()
    (control.folder / ".save.swp").touch()
    (control.folder / "eval").mkdir()
    assert control.read(1) == () == control.read(2)
    (message,) = said
    assert message.startswith("control: ") and "'Save'" in message and "and 2 more" in message
    assert "ask for eval, report, save, stop by an empty file" in message and "\x1b" not in message
    assert [entry.name for entry in control.folder.iterdir()] == [".save.swp"], "an editor's own"
    assert answers(tmp_path)[0][1:] == ("unknown", 1)


def test_what_cannot_be_removed_is_taken_once(control: Control, said: list[str]) -> None:
    (control.folder / "save").mkdir()
    (control.folder / "save" / "full").touch()
    assert control.read(1) == () == control.read(2) == control.read(3)
    assert [("cannot be removed" in text) + 2 * ("no request" in text) for text in said] == [1, 2]


def test_a_folder_that_is_gone_comes_back_and_one_that_is_none_ends_nothing(control: Control, said: list[str]) -> None:
    control.folder.rmdir()
    assert control.read(1) == () and control.folder.is_dir()
    control.folder.rmdir()
    control.folder.touch()
    assert control.read(2) == () == control.read(3)
    assert len(said) == 1 and "cannot be read" in said[0]
    control.folder.unlink()
    (control.run_dir / f"{Path(STATUS).stem}.partial").mkdir()
    ask_again = control.folder / "stop"
    control.folder.mkdir()
    ask_again.touch()
    assert control.read(4) == (Request.STOP,), "also where no status can be written"
    assert any("status.json cannot be written" in text for text in said)


def test_requests_before_and_after_the_run_are_dropped_and_said(tmp_path: Path) -> None:
    (tmp_path / "control").mkdir()
    (tmp_path / "control" / "stop").touch()
    said: list[str] = []
    made = Control(tmp_path, said.append)
    made.open(0, 2)
    assert made.read(1) == () and "before this run began" in said[0]
    for name in ("save", "eval"):
        (made.folder / name).touch()
    made.read(2)
    made.answer(Request.EVAL, "")
    (made.folder / "report").touch()
    made.close()
    states = [("stop", "dropped"), ("eval", "done"), ("save", "failed"), ("report", "dropped")]
    assert sorted((name, state) for name, state, _ in answers(tmp_path)) == sorted(states)
    status = read_status(tmp_path)
    assert status is not None and not status.running and not status.alive and (status.step, status.num_steps) == (2, 2)


def test_askers_who_race_each_get_an_answer(control: Control) -> None:
    """Eight ask while the run reads: every request that was asked for is answered, no matter who came when."""

    def asks(_: int) -> str:
        asked = ask(control.run_dir, Request.REPORT)
        return wait_for_answer(control.run_dir, Request.REPORT, asked, Deadline("test", "ask", 30)).state

    with ThreadPoolExecutor(8) as pool:
        found = [pool.submit(asks, at) for at in range(24)]
        step = 0
        while not all(each.done() for each in found):
            step += 1
            for request in control.read(step):
                control.answer(request, str(step))
    assert {each.result() for each in found} == {"done"}
    for request in control.read(step + 1):  # asked for again by who then took the answer before it, of the same moment
        control.answer(request, str(step))
    assert control.read(step + 2) == ()


def test_who_asked_is_said_where_it_is_somebody_else(
    control: Control, said: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (control.folder / "save").touch()
    mine = os.geteuid()
    monkeypatch.setattr(os, "geteuid", lambda: mine + 1)
    assert control.read(1) == (Request.SAVE,)
    assert said[0].startswith("control: save (asked for by ") and said[0].endswith("): seen")


@pytest.mark.parametrize(
    "text", ["", "{", "[]", "{}", '{"requests": [1]}', '{"requests": [], "step": "x", "num_steps": 1}']
)
def test_a_status_that_is_none(text: str, tmp_path: Path) -> None:
    (tmp_path / STATUS).write_text(text)
    with pytest.raises(DataError, match=r"status\.json cannot be (read|used)"):
        read_status(tmp_path)


def test_a_run_that_is_gone_is_not_taken_for_one_that_runs(tmp_path: Path) -> None:
    mine = RunStatus(1, 2)
    assert mine.alive and replace(mine, host="elsewhere", started="1").alive, "what another machine's run said last"
    assert not replace(mine, started="1").alive, "its process id has passed to another"
    write_status(
        tmp_path,
        mine.with_answer(ControlReply("save", 1.0, "seen", 1)).with_answer(ControlReply("save", 1.0, "done", 1)),
    )
    found = read_status(tmp_path)
    assert found is not None and [answer.state for answer in found.requests] == ["done"]
    with pytest.raises(DataError, match="ended without an answer"):
        write_status(tmp_path, replace(mine, running=False))
        wait_for_answer(tmp_path, Request.EVAL, 0.0, Deadline("test", "ask", 5))


def test_the_command(control: Control, tmp_path: Path) -> None:
    def run(*argv: object) -> subprocess.CompletedProcess[str]:
        line = [sys.executable, "scripts/control.py", *map(str, argv)]
        return subprocess.run(line, cwd=ROOT, capture_output=True, text=True, check=False)

    asked = run(tmp_path, "stop")
    assert (asked.returncode, "the run is at rollout 3 of 9" in asked.stdout) == (0, True), asked.stderr
    assert control.read(4) == (Request.STOP,)
    control.answer(Request.STOP, "ends")
    shown = run(tmp_path, "status")
    assert shown.returncode == 0 and "4 of 9 rollouts" in shown.stdout and "done after rollout 4: ends" in shown.stdout
    control.close()
    ended = run(tmp_path, "save")
    assert ended.returncode == 2 and "no run is going on here; the last one ended after 4" in ended.stderr
    assert not (control.folder / "save").exists()
    assert run(tmp_path / "none", "save").returncode == 2 == run(tmp_path, "sav").returncode
    assert json.loads((tmp_path / STATUS).read_text())["running"] is False
