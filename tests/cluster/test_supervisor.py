"""However a driver ends, its run ends: with the cause, a crash bundle and the exit code, and with all that was started."""

from __future__ import annotations

import fcntl
import os
import re
import signal
import subprocess
import sys
import termios
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import psutil
import pytest

from slime_like.util.deadline import Deadline
from tests.e2e.runs import REPOSITORY


class Driver:
    """A case of ``tests.cluster.drivers``."""

    def __init__(
        self,
        case: str,
        run_dir: Path,
        limit_s: float = 0.2,
        *,
        before: Callable[[], object] | None = None,
        stdin: int = 0,
    ) -> None:
        self.run_dir = run_dir
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.cluster.drivers", case, str(run_dir)],
            cwd=REPOSITORY,
            env=os.environ | {"LIMIT_S": str(limit_s)},
            stdin=stdin,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
            preexec_fn=before,
        )

    def end(self) -> tuple[int, str]:
        """Exit code, and what it said."""
        said = self.process.communicate(timeout=Deadline("test", "end", 30).limit)[1]
        return self.process.returncode, said

    def until(self, reached: Callable[[], bool]) -> None:
        """Wait for a moment of the driver."""
        deadline = Deadline("test", "driver", 30)
        while not reached():
            deadline.remaining("the driver")
            time.sleep(0.02)

    def left(self) -> list[int]:
        """Processes that it started and that live."""
        path = self.run_dir / "pids"
        pids = [int(line) for line in path.read_text().split()] if path.exists() else []
        return [pid for pid in pids if psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE]

    def causes(self) -> list[str]:
        """First lines of its crash bundles."""
        return [path.read_text().splitlines()[0] for path in self.run_dir.glob("crash-*/cause.txt")]


@pytest.mark.parametrize(
    ("case", "cause"),
    [
        ("killed", r"the driver \(process \d+\) was killed by SIGKILL: too little memory\?"),
        ("killed_with_ray", r"^ProcessLost: the driver \(process \d+\) was killed by SIGKILL"),
        ("ended_by_ray", r"the driver \(process \d+\) exited with code 1"),
        ("raylet_dies", r"Ray's raylet \(process \d+\) died: Ray cannot go on"),
        ("raylet_dies_first", r"Ray's raylet \(process \d+\) died: Ray cannot go on"),
        ("raylet_stops", r"Ray's raylet \(process \d+\) has been stopped for \d s"),
        (
            "joins_silence",
            r"driver waited \d+ s for the Ray cluster of placement.ray_address='127.0.0.1:\d+': start it with",
        ),
        ("never_connected", r"driver waited \d+ s for the cluster in phase 'placement'"),
    ],
)
def test_what_ends_a_run_from_outside_is_told_with_a_bundle(tmp_path: Path, case: str, cause: str) -> None:
    driver = Driver(case, tmp_path)
    code, said = driver.end()
    assert code == 1, said
    assert (driver.left(), (tmp_path / "rings").exists()) == ([], False)
    assert not (tmp_path / "blamed").exists()
    (told,) = driver.causes()
    for text in (said, told):
        assert re.search(cause, text), text
    assert f"crash bundle: {tmp_path}/crash-" in said
    assert "Traceback" not in said
    assert (tmp_path / "stopped").exists() == (case == "raylet_dies"), "a driver may not go on to blame others"


def test_an_actor_is_blamed_only_while_ray_lives(tmp_path: Path) -> None:
    driver = Driver("ray_lives", tmp_path)
    assert (driver.end()[0], driver.left(), driver.causes()) == (42, [], [])


def test_what_a_run_starts_ends_with_it_wherever_it_went(tmp_path: Path) -> None:
    driver = Driver("detaches", tmp_path)
    assert driver.end() == (0, "")
    assert (tmp_path / "pids").read_text()
    assert driver.left() == []
    assert driver.causes() == []


def test_a_teardown_that_waits_for_a_stopped_process_goes_on_without_it(tmp_path: Path) -> None:
    driver = Driver("teardown_waits", tmp_path)
    code, said = driver.end()
    assert (code, driver.left(), driver.causes()) == (1, [], [])
    assert re.search(r"driver waited \d+ s for Ray in phase 'teardown'", said)
    assert (tmp_path / "torn_down").exists()


def test_a_teardown_that_never_ends_is_ended_with_the_code_that_the_run_had(tmp_path: Path) -> None:
    code, said = Driver("teardown_hangs", tmp_path).end()
    assert code == 0, said
    assert "everything that this run has started is killed" in said


@pytest.mark.parametrize("case", ["never_connected", "joins_silence"])
def test_one_signal_ends_what_has_nothing_to_save(tmp_path: Path, case: str) -> None:
    driver = Driver(case, tmp_path, limit_s=600)
    driver.until((tmp_path / "ready").exists)
    driver.process.send_signal(signal.SIGTERM)
    code, said = driver.end()
    assert (code, driver.left(), driver.causes()) == (130, [], [])
    assert said.startswith("stopped while it waited for the ") or said == "stopped\n", said


def test_two_signals_end_a_driver_that_takes_none(tmp_path: Path) -> None:
    driver = Driver("deaf", tmp_path)
    driver.until((tmp_path / "ready").exists)
    for number in (signal.SIGINT, signal.SIGTERM):
        driver.process.send_signal(number)
    code, said = driver.end()
    assert (code, driver.left(), driver.causes()) == (130, [], [])
    assert "the driver did not react" in said


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_to_the_group_reaches_the_driver_once(tmp_path: Path, number: signal.Signals) -> None:
    driver = Driver("counts", tmp_path)
    driver.until((tmp_path / "ready").exists)
    os.killpg(driver.process.pid, number)
    assert driver.end() == (41, "")


def test_a_bug_ends_in_its_traceback(tmp_path: Path) -> None:
    code, said = Driver("raises", tmp_path).end()
    assert code == 1
    assert said.endswith(f"ValueError: a bug in {tmp_path.name}\n")


@pytest.mark.parametrize(("case", "end"), [("exits", (1, "set MY_KEY first\n")), ("exits_well", (0, ""))])
def test_sys_exit_in_user_code_keeps_its_code_and_words(tmp_path: Path, case: str, end: tuple[int, str]) -> None:
    assert Driver(case, tmp_path).end() == end


@pytest.mark.parametrize(("case", "code"), [("exits_well", 0), ("killed", 1)])
def test_an_exit_code_is_seen_also_where_children_were_ignored(tmp_path: Path, case: str, code: int) -> None:
    assert Driver(case, tmp_path, before=partial(signal.signal, signal.SIGCHLD, signal.SIG_IGN)).end()[0] == code


def test_a_driver_that_reads_from_the_terminal_gets_end_of_file_and_is_not_stopped(tmp_path: Path) -> None:
    user, terminal = os.openpty()
    try:
        driver = Driver(
            "reads_terminal", tmp_path, before=partial(fcntl.ioctl, 0, termios.TIOCSCTTY, 0), stdin=terminal
        )
        assert driver.end()[0] == 0
    finally:
        os.close(user)
        os.close(terminal)


def test_nothing_outlives_a_supervisor_that_is_killed(tmp_path: Path) -> None:
    driver = Driver("deaf", tmp_path)
    driver.until((tmp_path / "ready").exists)
    (child,) = psutil.Process(driver.process.pid).children()
    assert driver.left()
    driver.process.kill()
    driver.until(lambda: not driver.left() and not child.is_running())
    driver.until(lambda: not (tmp_path / "rings").exists())
    assert driver.end()[0] == -signal.SIGKILL
