"""Stack dumps of a run's processes: slow ones are waited for, up to a deadline."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from slime_like.cluster.supervise import stacks
from slime_like.cluster.supervise.stacks import gather_stacks, live_processes

CHILD = """
import sys
from pathlib import Path
from slime_like.cluster.supervise.stacks import dump_stacks_on_signal

dump_stacks_on_signal(Path(sys.argv[1]), sys.argv[2])
print("ready", flush=True)
sys.stdin.read()
"""
Start = Callable[[str], int]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Return a function that starts a process registered under a name and returns its id."""
    children: list[subprocess.Popen[str]] = []

    def start_child(name: str) -> int:
        command, pipe = [sys.executable, "-c", CHILD, str(tmp_path), name], subprocess.PIPE
        child = subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True)
        children.append(child)
        assert child.stdout is not None and child.stdout.readline() == "ready\n"
        return child.pid

    yield start_child
    for child in children:
        child.kill()
        child.communicate()


def stacks_of(folder: Path, name: str) -> str:
    (path,) = folder.glob(f"{name}.*.txt")
    return path.read_text()


def test_a_process_that_is_late_is_waited_for(start: Start, tmp_path: Path) -> None:
    late_pid = start("late")
    start("prompt")
    os.kill(late_pid, signal.SIGSTOP)
    wake = threading.Timer(0.5, os.kill, (late_pid, signal.SIGCONT))
    wake.start()
    gather_stacks(tmp_path, 60)
    wake.join()
    for name in ("late", "prompt"):
        assert 'File "<string>", line ' in stacks_of(tmp_path, name)


def test_a_stopped_process_does_not_hold_up_the_others(start: Start, tmp_path: Path) -> None:
    os.kill(start("stopped"), signal.SIGSTOP)
    start("prompt")
    gather_stacks(tmp_path, 2.0)
    assert stacks_of(tmp_path, "stopped") == ""
    assert "in <module>" in stacks_of(tmp_path, "prompt")


def test_a_process_that_ended_is_not_waited_for(start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The process ends between the listing and the signal."""
    start("prompt")
    (tmp_path / "ended.1.0.txt").touch()
    registered = live_processes(tmp_path)
    dead_process = subprocess.Popen([sys.executable, "-c", ""])
    dead_process.wait()
    monkeypatch.setattr(stacks, "live_processes", lambda _: registered | {"ended": dead_process.pid})
    assert "ended" not in registered
    gather_stacks(tmp_path, 3600)
    assert "in <module>" in stacks_of(tmp_path, "prompt")
