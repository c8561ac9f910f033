"""Child processes, real ones: ended by a signal, killed if they ignore it, and killed with their parent."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

import pytest

from slime_like.errors import DeadlineExceeded
from slime_like.quickstart import child
from slime_like.quickstart.child import run_child
from slime_like.util.deadline import Deadline

ROOT = Path(__file__).parents[2]
PARENT = """
import sys
from slime_like.util.deadline import Deadline
from slime_like.quickstart import child
child.END_S = float(sys.argv[1])
try:
    child.run_child("the child", [sys.executable, "-c", *sys.argv[2:]], Deadline("test", "child", 600))
except KeyboardInterrupt as stopped:
    sys.exit(str(stopped))
"""
# Exits at the second signal, like train.py, and reports both by os.write, because a signal may interrupt print.
OBEYS = """
import os, signal
received = []
def note(number, frame):
    received.append(signal.Signals(number).name)
    if len(received) == 2:
        os.write(1, (" ".join(sorted(received)) + "\\n").encode())
        raise SystemExit(130)
for number in (signal.SIGINT, signal.SIGTERM):
    signal.signal(number, note)
os.write(1, b"ready\\n")
while True:
    signal.pause()
"""
# Ignores signals, and starts a process that outlives it.
STUBBORN = """
import signal, subprocess
for number in (signal.SIGINT, signal.SIGTERM):
    signal.signal(number, signal.SIG_IGN)
subprocess.Popen(["sleep", "600"])
print("ready", flush=True)
while True:
    signal.pause()
"""


@contextmanager
def parent(program: str, end_s: float = 60.0) -> Generator[subprocess.Popen[str]]:
    """Start a process with a child in a process group of its own, as on a terminal."""
    command = [sys.executable, "-c", PARENT, str(end_s), program]
    process = subprocess.Popen(
        command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True
    )
    try:
        assert process.stdout is not None and process.stdout.readline() == "ready\n"
        yield process
    finally:
        process.kill()
        process.wait()


def remaining_output(process: subprocess.Popen[str]) -> str:
    """Return the output until the last process that could write has ended."""
    assert process.stdout is not None
    return process.stdout.read()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_one_signal_to_the_parent_ends_the_child(number: signal.Signals) -> None:
    with parent(OBEYS) as process:
        for _ in range(2):  # a repeated signal changes nothing
            os.killpg(process.pid, number)
        output = remaining_output(process)
        assert process.wait() == 1
    assert "SIGINT SIGTERM\n" in output, "each once, although the process group got more"
    assert "stopping the child" in output
    assert f"the child was stopped by {number.name}" in output and "Traceback" not in output


def test_a_child_that_ignores_signals_is_killed_with_its_group() -> None:
    with parent(STUBBORN, end_s=0.1) as process:
        process.terminate()
        assert "the child was stopped by SIGTERM" in remaining_output(process), "the output ends, so no process is left"


def test_a_child_is_killed_with_its_parent() -> None:
    with parent(OBEYS) as process:
        process.kill()
        assert remaining_output(process) == "", "the child ended silently"


def test_a_child_of_a_dead_parent_does_not_start() -> None:
    command = [sys.executable, str(child.BOUND), "1", sys.executable, "-c", "print('began')"]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (result.returncode, result.stdout) == (1, "")
    assert "has ended" in result.stderr


def test_exit_codes_are_returned_and_signal_handlers_restored() -> None:
    handlers = [signal.getsignal(number) for number in child.SIGNALS]
    assert run_child("it", [sys.executable, "-c", "raise SystemExit(7)"], Deadline("test", "child", 60)) == 7
    assert [signal.getsignal(number) for number in child.SIGNALS] == handlers


def test_a_deadline_ends_the_child(capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(DeadlineExceeded, match=r"waited .* for it in phase"):
        run_child("it", [sys.executable, "-c", OBEYS], Deadline("test", "child", 0.05))
    assert "Traceback" not in capfd.readouterr().err
