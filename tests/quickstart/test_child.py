"""A child that is asked to end, one that will not, and one whose parent is killed: real processes and signals."""

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
# Ends as train.py does: at the second signal, and says so; not by print, in which the signal may find it.
OBEYS = """
import os, signal
said = []
def note(number, frame):
    said.append(signal.Signals(number).name)
    if len(said) == 2:
        os.write(1, (" ".join(sorted(said)) + "\\n").encode())
        raise SystemExit(130)
for number in (signal.SIGINT, signal.SIGTERM):
    signal.signal(number, note)
os.write(1, b"ready\\n")
while True:
    signal.pause()
"""
# Does not, nor does what it has started.
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
    """A process that has started a child, in a group of its own as on a terminal."""
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


def rest(process: subprocess.Popen[str]) -> str:
    """What is said until the last process that could say something has ended."""
    assert process.stdout is not None
    return process.stdout.read()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_the_child_as_a_second_one_would(number: signal.Signals) -> None:
    with parent(OBEYS) as process:
        for _ in range(2):  # once more, impatiently: changes nothing
            os.killpg(process.pid, number)
        said = rest(process)
        assert process.wait() == 1
    assert "SIGINT SIGTERM\n" in said, "each once, though the terminal's group got more"
    assert "stopping the child: a moment" in said
    assert f"the child was stopped by {number.name}" in said and "Traceback" not in said


def test_a_child_that_will_not_end_is_killed_with_its_group() -> None:
    with parent(STUBBORN, end_s=0.1) as process:
        process.terminate()
        assert "the child was stopped by SIGTERM" in rest(process), "read to its end: nobody is left to write"


def test_a_child_is_killed_with_its_parent() -> None:
    with parent(OBEYS) as process:
        process.kill()
        assert rest(process) == "", "it ended, and without a word"


def test_a_child_whose_parent_has_gone_before_does_not_begin() -> None:
    command = [sys.executable, str(child.BOUND), "1", sys.executable, "-c", "print('began')"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (1, "")
    assert "is gone" in done.stderr


def test_exit_codes_come_through_and_signals_are_given_back() -> None:
    before = [signal.getsignal(number) for number in child.SIGNALS]
    assert run_child("it", [sys.executable, "-c", "raise SystemExit(7)"], Deadline("test", "child", 60)) == 7
    assert [signal.getsignal(number) for number in child.SIGNALS] == before


def test_a_deadline_ends_it(capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(DeadlineExceeded, match=r"waited .* for it in phase"):
        run_child("it", [sys.executable, "-c", OBEYS], Deadline("test", "child", 0.05))
    assert "Traceback" not in capfd.readouterr().err
