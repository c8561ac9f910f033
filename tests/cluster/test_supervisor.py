"""Supervisor: however a driver ends, the run ends with its cause, a crash bundle, an exit code and no process left."""

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
from tests.cluster.driver_server import ForkedDriver
from tests.e2e.runs import REPOSITORY
from tests.process_states import is_alive


class Driver:
    """Process that runs a case of ``tests.cluster.drivers``: a new interpreter with ``preexec``, else a fork of a server."""

    def __init__(
        self,
        case: str,
        run_dir: Path,
        limit_s: float = 0.2,
        *,
        preexec: Callable[[], object] | None = None,
        stdin: int = 0,
    ) -> None:
        self.run_dir = run_dir
        self.process: subprocess.Popen[str] | ForkedDriver
        if preexec is None:
            self.process = ForkedDriver(case, run_dir, limit_s)
            return
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.cluster.drivers", case, str(run_dir)],
            cwd=REPOSITORY,
            env=os.environ | {"LIMIT_S": str(limit_s)},
            stdin=stdin,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
            preexec_fn=preexec,
        )

    def end(self) -> tuple[int, str]:
        """Wait until the driver has ended. Return its exit code and its stderr."""
        stderr = self.process.communicate(timeout=Deadline("test", "end", 30).limit)[1]
        assert self.process.returncode is not None
        return self.process.returncode, stderr

    def until(self, reached: Callable[[], bool]) -> None:
        """Wait until ``reached`` is true."""
        deadline = Deadline("test", "driver", 30)
        while not reached():
            deadline.remaining("the driver")
            time.sleep(0.02)

    def living(self) -> list[int]:
        """Return the ids of processes that the driver started and that are alive."""
        path = self.run_dir / "pids"
        pids = [int(line) for line in path.read_text().split()] if path.exists() else []
        return [pid for pid in pids if is_alive(pid)]

    def causes(self) -> list[str]:
        """Return the first line of the cause in each crash bundle."""
        return [path.read_text().splitlines()[0] for path in self.run_dir.glob("crash-*/cause.txt")]


@pytest.mark.parametrize(
    ("case", "cause"),
    [
        ("killed", r"the driver \(process \d+\) was killed by SIGKILL: too little memory\?"),
        ("killed_with_ray", r"^ProcessLost: the driver \(process \d+\) was killed by SIGKILL"),
        ("ended_by_ray", r"the driver \(process \d+\) exited with code 1"),
        ("raylet_dies", r"Ray's raylet \(process \d+\) died: Ray cannot continue"),
        ("raylet_dies_first", r"Ray's raylet \(process \d+\) died: Ray cannot continue"),
        ("raylet_stops", r"Ray's raylet \(process \d+\) has been stopped for \d s"),
        (
            "joins_silence",
            r"driver waited \d+ s for the Ray cluster of placement.ray_address='127.0.0.1:\d+': start it with",
        ),
        ("never_connected", r"driver waited \d+ s for the cluster in phase 'placement'"),
    ],
)
def test_external_ends_are_reported_with_a_bundle(tmp_path: Path, case: str, cause: str) -> None:
    driver = Driver(case, tmp_path)
    code, stderr = driver.end()
    assert code == 1, stderr
    assert (driver.living(), (tmp_path / "rings").exists()) == ([], False)
    assert not (tmp_path / "blamed").exists()
    (bundle_cause,) = driver.causes()
    for text in (stderr, bundle_cause):
        assert re.search(cause, text), text
    assert f"crash bundle: {tmp_path}/crash-" in stderr
    assert "Traceback" not in stderr
    assert (tmp_path / "stopped").exists() == (case == "raylet_dies"), (
        "the driver must not continue and report a misleading error"
    )


def test_an_actor_is_blamed_only_while_ray_lives(tmp_path: Path) -> None:
    driver = Driver("ray_lives", tmp_path)
    assert (driver.end()[0], driver.living(), driver.causes()) == (42, [], [])


def test_detached_processes_end_with_the_run(tmp_path: Path) -> None:
    driver = Driver("detaches", tmp_path)
    assert driver.end() == (0, "")
    assert (tmp_path / "pids").read_text()
    assert driver.living() == []
    assert driver.causes() == []


def test_a_teardown_continues_past_a_stopped_process(tmp_path: Path) -> None:
    driver = Driver("teardown_waits", tmp_path)
    code, stderr = driver.end()
    assert (code, driver.living(), driver.causes()) == (1, [], [])
    assert re.search(r"driver waited \d+ s for Ray in phase 'teardown'", stderr)
    assert (tmp_path / "torn_down").exists()


def test_a_hanging_teardown_is_killed_with_the_runs_exit_code(tmp_path: Path) -> None:
    code, stderr = Driver("teardown_hangs", tmp_path).end()
    assert code == 0, stderr
    assert "all processes of this run are killed" in stderr


@pytest.mark.parametrize("case", ["never_connected", "joins_silence"])
def test_one_signal_ends_a_start_that_waits(tmp_path: Path, case: str) -> None:
    driver = Driver(case, tmp_path, limit_s=600)
    driver.until((tmp_path / "ready").exists)
    driver.process.send_signal(signal.SIGTERM)
    code, stderr = driver.end()
    assert (code, driver.living(), driver.causes()) == (130, [], [])
    assert stderr.startswith("stopped while it waited for the ") or stderr == "stopped\n", stderr


def test_two_signals_end_a_driver_that_ignores_them(tmp_path: Path) -> None:
    driver = Driver("deaf", tmp_path)
    driver.until((tmp_path / "ready").exists)
    for number in (signal.SIGINT, signal.SIGTERM):
        driver.process.send_signal(number)
    code, stderr = driver.end()
    assert (code, driver.living(), driver.causes()) == (130, [], [])
    assert "the driver did not react" in stderr


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_to_the_group_reaches_the_driver_once(tmp_path: Path, number: signal.Signals) -> None:
    driver = Driver("counts", tmp_path)
    driver.until((tmp_path / "ready").exists)
    os.killpg(driver.process.pid, number)
    assert driver.end() == (41, "")


def test_a_bug_ends_in_its_traceback(tmp_path: Path) -> None:
    code, stderr = Driver("raises", tmp_path).end()
    assert code == 1
    assert stderr.endswith(f"ValueError: a bug in {tmp_path.name}\n")


@pytest.mark.parametrize(("case", "end"), [("exits", (1, "set MY_KEY first\n")), ("exits_well", (0, ""))])
def test_sys_exit_in_user_code_keeps_its_code_and_words(tmp_path: Path, case: str, end: tuple[int, str]) -> None:
    assert Driver(case, tmp_path).end() == end


@pytest.mark.parametrize(("case", "code"), [("exits_well", 0), ("killed", 1)])
def test_the_exit_code_is_kept_if_sigchld_was_ignored(tmp_path: Path, case: str, code: int) -> None:
    assert Driver(case, tmp_path, preexec=partial(signal.signal, signal.SIGCHLD, signal.SIG_IGN)).end()[0] == code


def test_a_driver_that_reads_from_the_terminal_gets_end_of_file(tmp_path: Path) -> None:
    user, terminal = os.openpty()
    try:
        driver = Driver(
            "reads_terminal", tmp_path, preexec=partial(fcntl.ioctl, 0, termios.TIOCSCTTY, 0), stdin=terminal
        )
        assert driver.end()[0] == 0
    finally:
        os.close(user)
        os.close(terminal)


def test_nothing_outlives_a_supervisor_that_is_killed(tmp_path: Path) -> None:
    driver = Driver("deaf", tmp_path)
    driver.until((tmp_path / "ready").exists)
    (child,) = psutil.Process(driver.process.pid).children()
    assert driver.living()
    driver.process.kill()
    driver.until(lambda: not driver.living() and not child.is_running())
    driver.until(lambda: not (tmp_path / "rings").exists())
    assert driver.end()[0] == -signal.SIGKILL
