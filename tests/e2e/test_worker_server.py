"""Forks of ``tests/e2e/worker_server.py`` behave like processes that ran the command themselves."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Generator
from contextlib import contextmanager
from multiprocessing.connection import wait
from pathlib import Path

import pytest

from slime_like.util.deadline import Deadline
from tests.e2e.forked.fork_client import ADDRESS, LOG, SCRIPT
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
