"""Run control: requests by file and by signal, repeated, unknown or from another user; and scripts/control.py."""

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

from slime_like.checkpoint.files import SCRATCH
from slime_like.cluster.run.control import Control, Request
from slime_like.cluster.run.control_client import send_request, wait_for_answer
from slime_like.cluster.run.status import STATUS, ControlReply, RunStatus, read_status, write_status
from slime_like.errors import DataError
from slime_like.util.deadline import Deadline

ROOT = Path(__file__).parents[2]


@pytest.fixture
def messages() -> list[str]:
    return []


@pytest.fixture
def control(tmp_path: Path, messages: list[str]) -> Iterator[Control]:
    control = Control(tmp_path, messages.append)
    control.open(2, 9)
    yield control
    control.close()


def answers(folder: Path) -> list[tuple[str, str, int]]:
    status = read_status(folder)
    assert status is not None
    return [(answer.request, answer.state, answer.step) for answer in status.requests]


def test_a_request_is_acknowledged_once_and_answered(control: Control, messages: list[str], tmp_path: Path) -> None:
    assert control.read(3) == ()
    status = read_status(tmp_path)
    assert status is not None and status.alive and (status.step, status.num_steps) == (3, 9)
    for name in ("stop", "save"):
        (control.folder / name).touch()
    assert control.read(4) == (Request.SAVE, Request.STOP), "in order of execution"
    assert answers(tmp_path) == [("save", "seen", 4), ("stop", "seen", 4)]
    control.answer(Request.SAVE, "checkpoints/iter_0000004")
    control.answer(Request.STOP, "why", failed=True)
    assert control.read(5) == () and list(control.folder.iterdir()) == []
    assert answers(tmp_path) == [("save", "done", 4), ("stop", "failed", 4)]
    assert "control: save: seen" in messages and "control: save: done: checkpoints/iter_0000004" in messages
    assert "control: stop: failed: why" in messages and len(messages) == 4


def test_request_files_are_not_opened_and_duplicates_merge(control: Control) -> None:
    path = control.folder / "save"
    path.write_bytes(b"\xff half a word")
    path.touch()
    send_request(control.run_dir, Request.SAVE)
    os.symlink("/nowhere", control.folder / "eval")
    os.mkfifo(control.folder / "report")
    assert control.read(1) == (Request.EVAL, Request.SAVE, Request.REPORT), "without opening the files"
    for request in (Request.EVAL, Request.SAVE, Request.REPORT):
        control.answer(request, "")
    assert control.read(2) == ()
    path.touch()
    assert control.read(3) == (Request.SAVE,), "a new request after the first was read"


def test_the_newest_number_of_engines_counts(control: Control, messages: list[str], tmp_path: Path) -> None:
    for time_s, name in enumerate(("engines=30", "engines=2", "engines=4")):
        (control.folder / name).touch()
        os.utime(control.folder / name, (time_s, time_s))
    for name in ("engines", "engines=", "engines=0", "engines=02", "engines=-1", "engines=12345", "engines=²"):
        (control.folder / name).touch()
    assert control.read(1) == (Request.ENGINES,) and control.num_engines == 4
    control.answer(Request.ENGINES, "4 engines: engine 3 started")
    states = {name: state for name, state, _ in answers(tmp_path)}
    assert [states.pop(name) for name in ("engines=30", "engines=2", "engines=4")] == ["dropped", "dropped", "done"]
    assert list(states.values()) == ["unknown"] and "control: engines=2: dropped: replaced by engines=4" in messages


def test_the_signal_is_a_save(control: Control) -> None:
    os.kill(os.getpid(), signal.SIGUSR2)
    assert control.read(1) == (Request.SAVE,)
    control.answer(Request.SAVE, "")
    assert control.read(2) == ()


def test_signal_handlers_are_restored(tmp_path: Path) -> None:
    before = signal.getsignal(signal.SIGUSR2)
    control_channel = Control(tmp_path, print)
    control_channel.open(0, 1)
    assert signal.getsignal(signal.SIGUSR2) != before
    control_channel.close()
    assert signal.getsignal(signal.SIGUSR2) == before


def test_unknown_requests_are_removed_with_one_message(control: Control, messages: list[str], tmp_path: Path) -> None:
    hostile = "\x1b[31m[red]" + "a" * 100
    for name in ("sav", "Save", "save~", hostile):
        (control.folder / name).touch()
    (control.folder / ".save.swp").touch()
    (control.folder / "eval").mkdir()
    assert control.read(1) == () == control.read(2)
    (message,) = messages
    assert message.startswith("control: ") and "'Save'" in message and "and 2 more" in message
    assert "create an empty file named one of engines=N, eval, report, save, stop" in message and "\x1b" not in message
    assert [entry.name for entry in control.folder.iterdir()] == [".save.swp"], "an editor's swap file stays"
    assert answers(tmp_path)[0][1:] == ("unknown", 1)


def test_a_request_that_cannot_be_removed_is_reported_once(control: Control, messages: list[str]) -> None:
    (control.folder / "save").mkdir()
    (control.folder / "save" / "full").touch()
    assert control.read(1) == () == control.read(2) == control.read(3)
    assert [("cannot be removed" in text) + 2 * ("unknown request" in text) for text in messages] == [1, 2]


def test_a_lost_control_folder_is_recreated_and_a_file_in_its_place_is_tolerated(
    control: Control, messages: list[str]
) -> None:
    control.folder.rmdir()
    assert control.read(1) == () and control.folder.is_dir()
    control.folder.rmdir()
    control.folder.touch()
    assert control.read(2) == () == control.read(3)
    assert len(messages) == 1 and "cannot be read" in messages[0]
    control.folder.unlink()
    (control.run_dir / f"{STATUS}{SCRATCH}").mkdir()
    stop_request = control.folder / "stop"
    control.folder.mkdir()
    stop_request.touch()
    assert control.read(4) == (Request.STOP,), "even if the status cannot be written"
    assert any("status.json cannot be written" in text for text in messages)


def test_requests_before_and_after_the_run_are_dropped_with_a_message(tmp_path: Path) -> None:
    (tmp_path / "control").mkdir()
    (tmp_path / "control" / "stop").touch()
    messages: list[str] = []
    late_control = Control(tmp_path, messages.append)
    late_control.open(0, 2)
    assert late_control.read(1) == () and "before this run started" in messages[0]
    for name in ("save", "eval"):
        (late_control.folder / name).touch()
    late_control.read(2)
    late_control.answer(Request.EVAL, "")
    (late_control.folder / "report").touch()
    late_control.close()
    states = [("stop", "dropped"), ("eval", "done"), ("save", "failed"), ("report", "dropped")]
    assert sorted((name, state) for name, state, _ in answers(tmp_path)) == sorted(states)
    status = read_status(tmp_path)
    assert status is not None and not status.running and not status.alive and (status.step, status.num_steps) == (2, 2)


def test_concurrent_requests_are_all_answered(control: Control) -> None:
    """Eight threads send requests while the run reads; each one gets an answer."""

    def send_and_wait(_: int) -> str:
        asked_at = send_request(control.run_dir, Request.REPORT)
        return wait_for_answer(control.run_dir, Request.REPORT, asked_at, Deadline("test", "ask", 30)).state

    with ThreadPoolExecutor(8) as pool:
        replies = [pool.submit(send_and_wait, index) for index in range(24)]
        step = 0
        while not all(reply.done() for reply in replies):
            step += 1
            for request in control.read(step):
                control.answer(request, str(step))
    assert {reply.result() for reply in replies} == {"done"}
    for request in control.read(step + 1):  # a client may have accepted an earlier answer with the same timestamp
        control.answer(request, str(step))
    assert control.read(step + 2) == ()


def test_requests_of_another_user_are_logged_with_the_name(
    control: Control, messages: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (control.folder / "save").touch()
    own_uid = os.geteuid()
    monkeypatch.setattr(os, "geteuid", lambda: own_uid + 1)
    assert control.read(1) == (Request.SAVE,)
    assert messages[0].startswith("control: save (requested by ") and messages[0].endswith("): seen")


@pytest.mark.parametrize(
    "text", ["", "{", "[]", "{}", '{"requests": [1]}', '{"requests": [], "step": "x", "num_steps": 1}']
)
def test_a_malformed_status_file_is_refused(text: str, tmp_path: Path) -> None:
    (tmp_path / STATUS).write_text(text)
    with pytest.raises(DataError, match=r"status\.json cannot be (read|used)"):
        read_status(tmp_path)


def test_an_ended_run_is_not_reported_as_alive(tmp_path: Path) -> None:
    this_run = RunStatus(1, 2)
    assert this_run.alive and replace(this_run, host="elsewhere", started="1").alive, (
        "a process of another machine cannot be checked"
    )
    assert not replace(this_run, started="1").alive, "its process id was reused"
    write_status(
        tmp_path,
        this_run.with_answer(ControlReply("save", 1.0, "seen", 1)).with_answer(ControlReply("save", 1.0, "done", 1)),
    )
    status = read_status(tmp_path)
    assert status is not None and [answer.state for answer in status.requests] == ["done"]
    with pytest.raises(DataError, match="ended without an answer"):
        write_status(tmp_path, replace(this_run, running=False))
        wait_for_answer(tmp_path, Request.EVAL, 0.0, Deadline("test", "ask", 5))


def test_the_command(control: Control, tmp_path: Path) -> None:
    def run(*argv: object) -> subprocess.CompletedProcess[str]:
        line = [sys.executable, "scripts/control.py", *map(str, argv)]
        return subprocess.run(line, cwd=ROOT, capture_output=True, text=True, check=False)

    stop_request = run(tmp_path, "stop")
    assert (stop_request.returncode, "the run is at rollout 3 of 9" in stop_request.stdout) == (0, True), (
        stop_request.stderr
    )
    assert control.read(4) == (Request.STOP,)
    control.answer(Request.STOP, "ends")
    status_result = run(tmp_path, "status")
    assert (
        status_result.returncode == 0
        and "4 of 9 rollouts" in status_result.stdout
        and "done after rollout 4: ends" in status_result.stdout
    )
    control.close()
    save_result = run(tmp_path, "save")
    assert save_result.returncode == 2 and "no run is active here; the last one ended after 4" in save_result.stderr
    assert not (control.folder / "save").exists()
    assert run(tmp_path / "none", "save").returncode == 2 == run(tmp_path, "sav").returncode
    assert "choose one of eval, save, report, engines=N, stop, status" in run(tmp_path, "engines=0").stderr
    assert json.loads((tmp_path / STATUS).read_text())["running"] is False
