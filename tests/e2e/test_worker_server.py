"""Forks of ``tests/e2e/worker_server.py`` behave like processes that ran the command themselves."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Generator
from contextlib import contextmanager
from multiprocessing.connection import wait
from pathlib import Path

import pytest

from slime_like.util.deadline import Deadline
from tests.e2e.forked.fork_client import ADDRESS, FORK_DRIVER, LOG, SCRIPT
from tests.e2e.forked_training import ForkedTraining
from tests.e2e.worker_server import CLIENT, forking_workers

pytestmark = pytest.mark.e2e
WAIT_S = 30.0
WORKER = """
import json, os, pathlib, sys, time
read = lambda name: pathlib.Path("/proc/self", name).read_bytes().decode()
print(json.dumps({
    "arguments": sys.argv[1:], "has_torch": "torch" in sys.modules, "name": __name__,
    "folder": os.getcwd(), "variable": os.environ["OF_WORKER"], "stdin": sys.stdin.read(),
    "shown": "OF_WORKER=7" in read("environ").split(chr(0)), "path": [path for path in sys.path if "site-packages" not in path][:2], "group": os.getpgid(0) == os.getpid(),
    "threads": len(os.listdir("/proc/self/task")), "pid": os.getpid(),
}), flush=True)
exec(sys.argv[1])
"""

DRIVER = """
import json, os, pathlib, sys, time
shown = "OF_WORKER=7" in pathlib.Path("/proc/self/environ").read_text().split(chr(0))
forks = "SLIME_LIKE_TEST_FORK_DRIVER" in os.environ
print(json.dumps({"pid": os.getpid(), "session": os.getsid(0), "shown": shown, "forks": forks}), flush=True)
"""


@pytest.fixture
def script(tmp_path: Path) -> Path:
    """Return a script at the path of Ray's worker that describes its process and then runs its first argument."""
    path = tmp_path / SCRIPT.lstrip("/")
    path.parent.mkdir(parents=True)
    path.write_text(WORKER)
    return path


@contextmanager
def worker(script: Path, action: str, **variables: str) -> Generator[subprocess.Popen[str]]:
    """Start a worker as the raylet does; kill it at the end."""
    environment = os.environ | forking_workers() | {"HF_HUB_OFFLINE": "1", "OF_WORKER": "7", **variables}
    with subprocess.Popen(
        [sys.executable, str(script), action],
        cwd=script.parent,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    ) as process:
        try:
            yield process
        finally:
            process.kill()


def run(script: Path, action: str, **variables: str) -> tuple[int, str]:
    """Run a worker to its end; return exit code and output."""
    with worker(script, action, **variables) as process:
        output, _ = process.communicate(timeout=Deadline("test", "worker", WAIT_S).limit)
        return process.returncode, output


def test_a_fork_has_arguments_files_folder_and_environment_of_the_command(script: Path) -> None:
    code, output = run(script, "sys.exit(3)")
    description = json.loads(output)
    assert code == 3
    assert description.pop("pid") > 0
    assert description == {
        "arguments": ["sys.exit(3)"],
        "has_torch": True,
        "name": "__main__",
        "folder": str(script.parent),
        "variable": "7",
        "stdin": "",
        "shown": True,
        "path": [str(script.parent), str(CLIENT)],
        "group": True,
        "threads": 1,
    }


def test_a_driver_has_its_own_session_and_ends_as_its_script(tmp_path: Path) -> None:
    script, started = tmp_path / "train.py", tmp_path / "started"
    script.write_text(f"{DRIVER}pathlib.Path({str(started)!r}).touch(); exec(sys.argv[1])\n")
    endings = {
        "sys.exit(3)": 3,
        "sys.exit()": 0,
        "pass": 0,
        "sys.exit('its last words')": 1,
        "raise OSError('its last words')": 1,
        "import threading; threading.Thread(target=lambda: (time.sleep(0.2), print('its last words'))).start()": 0,
        "import atexit; atexit.register(print, 'its last words')": 0,
        "time.sleep(600)": -signal.SIGTERM,
    }
    for action, code in endings.items():
        started.unlink(missing_ok=True)
        with (tmp_path / "log").open("w+b") as log:
            driver = ForkedTraining([str(script), action], tmp_path, driver_environment(), log)
            deadline = Deadline("test", "a driver", WAIT_S)
            while driver.poll() is None:
                if code < 0 and started.exists():
                    driver.send_signal(signal.Signals(-code))
                time.sleep(min(0.05, deadline.remaining(action)))
        description, _, text = (tmp_path / "log").read_text().partition("\n")
        assert json.loads(description) == {"pid": driver.pid, "session": driver.pid, "shown": True, "forks": False}
        assert (driver.poll(), driver.wait()) == (code, code)
        assert ("its last words" in text) == ("its last words" in action)


def driver_environment() -> dict[str, str]:
    """Return the environment that ``Training`` gives a driver."""
    environment = os.environ | forking_workers() | {"HF_HUB_OFFLINE": "1", "OF_WORKER": "7"}
    return {name: value for name, value in environment.items() if name != FORK_DRIVER}


def test_a_driver_is_forked_only_on_request(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(f"{DRIVER}print('torch' in sys.modules)\n")
    for driver in (True, False):
        environment = os.environ | forking_workers(driver=driver) | {"HF_HUB_OFFLINE": "1"}
        output = subprocess.check_output([sys.executable, script], env=environment, cwd=tmp_path, text=True)
        description, forked, _ = output.split("\n")
        assert forked == str(driver)
        assert json.loads(description)["forks"] is False, "its own train.py is not forked"


def test_a_fork_that_fails_or_dies_ends_the_process_of_the_command_in_the_same_way(script: Path) -> None:
    code, output = run(script, "raise OSError('of the worker')")
    assert code == 1 and "OSError: of the worker" in output
    assert run(script, "os.kill(os.getpid(), 9)")[0] == -signal.SIGKILL
    assert run(script, "os.kill(os.getpid(), 15)")[0] == -signal.SIGTERM


def test_ray_shows_the_title_of_a_fork(script: Path) -> None:
    title = "import ray._raylet as r; r.setproctitle('ray::Title'); print(read('cmdline').strip(chr(0)))"
    _, output = run(script, title, SPT_NOENV="1")
    assert output.splitlines()[-1].strip() == "ray::Title"


def test_a_fork_ends_with_the_process_of_the_command(script: Path) -> None:
    with worker(script, "time.sleep(600)") as process:
        assert process.stdout is not None
        handle = os.pidfd_open(json.loads(process.stdout.readline())["pid"])
        process.kill()
        assert wait([handle], Deadline("test", "end of a fork", WAIT_S).limit) == [handle]
        os.close(handle)


def test_other_values_of_variables_that_torch_reads_are_an_error(script: Path) -> None:
    code, output = run(script, "", OMP_NUM_THREADS="3")
    assert code == 1
    assert "the server has imported torch with other values of ['OMP_NUM_THREADS=3']" in output


def test_a_server_that_has_ended_is_an_error(script: Path, tmp_path: Path) -> None:
    (tmp_path / LOG).write_text("MemoryError: its last line\n")
    code, output = run(script, "", **{ADDRESS: str(tmp_path / "socket")})
    assert code == 1
    assert "No such file or directory" in output and "MemoryError: its last line" in output
