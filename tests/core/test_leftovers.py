"""Leftover checks of the end-to-end tests: each kind of leftover is planted and detected."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from uuid import uuid4

import psutil
import pytest

from slime_like.util.deadline import Deadline
from tests.e2e import leftovers as module
from tests.e2e.leftovers import MARK, SHARED_MEMORY, RunResources, address_of, is_marked, leftovers, listening

LISTENING_PROGRAM = """
import socket, sys
server = socket.create_server(("127.0.0.1", 0))
print(server.getsockname()[1], flush=True)
sys.stdin.read()
"""


WORKER = """
import os, signal, setproctitle
setproctitle.setproctitle("ray::A")
print(os.getpid(), flush=True)
signal.pause()
"""
PARENT = f"""
import subprocess, sys
subprocess.run([sys.executable, "-c", {WORKER!r}])
"""


@pytest.fixture
def mark(monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setattr(module, "MAX_EXIT_S", 0.0)
    return str(uuid4())


@pytest.fixture
def server(mark: str) -> Iterator[tuple[subprocess.Popen[str], int]]:
    """Start a marked process and yield it with the port it listens on."""
    command, pipe = [sys.executable, "-c", LISTENING_PROGRAM], subprocess.PIPE
    with subprocess.Popen(command, env=os.environ | {MARK: mark}, stdin=pipe, stdout=pipe, text=True) as process:
        assert process.stdout is not None
        yield process, int(process.stdout.readline())
        process.kill()


def test_a_living_process_is_reported_with_its_port(mark: str, server: tuple[subprocess.Popen[str], int]) -> None:
    process, port = server
    resources = RunResources(mark)
    resources.record()
    assert set(resources.ports.values()) == {f"127.0.0.1:{port}"}
    first, second = leftovers(resources)
    assert first.startswith(f"process {process.pid}: {sys.executable}")
    assert second == f"port 127.0.0.1:{port}: somebody listens"
    process.communicate()
    assert leftovers(resources) == []


def test_a_port_of_an_unseen_process_is_found(mark: str, server: tuple[subprocess.Popen[str], int]) -> None:
    process, port = server
    resources = RunResources(mark)
    resources.record()
    other_run = RunResources("of another run", ports=resources.ports)
    assert leftovers(other_run) == [f"port 127.0.0.1:{port}: somebody listens"]
    process.communicate()
    assert leftovers(other_run) == []


def test_processes_that_are_ending_are_waited_for(
    mark: str, server: tuple[subprocess.Popen[str], int], monkeypatch: pytest.MonkeyPatch
) -> None:
    process, _ = server
    resources = RunResources(mark)
    resources.record()
    actions = iter((lambda: None, process.communicate))  # the process ends after the second check
    monkeypatch.setattr(module, "MAX_EXIT_S", 30.0)
    monkeypatch.setattr(module, "time", SimpleNamespace(sleep=lambda _: next(actions)()))
    assert leftovers(RunResources("of another run", ports=resources.ports)) == []
    assert not list(actions)


def test_a_process_whose_title_overwrote_its_mark_is_found(mark: str) -> None:
    """Ray's agents are such processes. They are found as children of a marked process, later by a recorded id."""
    command, pipe = [sys.executable, "-c", PARENT], subprocess.PIPE
    resources = RunResources(mark)
    with subprocess.Popen(command, env=os.environ | {MARK: mark}, stdin=pipe, stdout=pipe, text=True) as parent:
        assert parent.stdout is not None and parent.stdin is not None
        worker = int(parent.stdout.readline())
        process = psutil.Process(worker)
        try:
            assert not is_marked(worker, mark)
            resources.record()
            parent.kill()
            parent.wait()
            assert leftovers(resources) == [f"process {worker}: ray::A"]
        finally:
            os.kill(worker, signal.SIGKILL)
            process.wait(Deadline("test", "worker", 30).limit)
    assert leftovers(resources) == []


def test_a_name_in_shared_memory_is_found(mark: str) -> None:
    path = SHARED_MEMORY / f"slime_like.test.{mark}"
    path.touch()
    try:
        assert leftovers(RunResources(mark, shared_paths={path})) == [str(path)]
    finally:
        path.unlink()


def test_addresses_of_proc_net_are_decoded() -> None:
    assert address_of("0100007F:1F90") == "127.0.0.1:8080"
    assert address_of("00000000000000000000000001000000:0016") == "::1:22"
    with socket.create_server(("127.0.0.1", 0)) as server:
        inode, address = os.fstat(server.fileno()).st_ino, f"127.0.0.1:{server.getsockname()[1]}"
        assert listening()[inode] == address
    assert inode not in listening()


@pytest.mark.parametrize("mode", [0o700, 0o755])
def test_a_socket_that_other_users_can_reach_is_found(mark: str, mode: int) -> None:
    with tempfile.TemporaryDirectory(dir="/tmp") as folder, socket.socket(socket.AF_UNIX) as server:
        os.chmod(folder, mode)
        path = f"{folder}/raylet"
        server.bind(path)
        server.listen()
        assert path in module.unix_sockets([os.getpid()])
        resources = RunResources(mark, paths={path: module.is_private(path)})
        complaints = leftovers(resources)
    assert complaints == ([] if mode == 0o700 else [f"socket {path}: open to other users"]) + [path]
    assert leftovers(RunResources(mark, paths={path: module.is_private(path)})) == [], "the socket was removed"
    assert not module.is_private("@abstract")


def test_a_leaked_secret_is_found(mark: str, tmp_path: Path) -> None:
    command, environment = [sys.executable, "-c", "import sys; sys.stdin.read()", "--token=s3cret"], {MARK: mark}
    environment |= {"RAY_AUTH_TOKEN": "s3cret", "HF_TOKEN": "hidden"}
    resources = RunResources(mark)
    with subprocess.Popen(command, env=os.environ | environment, stdin=subprocess.PIPE) as process:
        deadline = Deadline("test", "exec", 30)
        while not module.is_marked(process.pid, mark):
            deadline.remaining("the process")
        resources.record()
        process.communicate()
    assert leftovers(resources) == ["RAY_AUTH_TOKEN on a command line"]
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs" / "engine_0.log").write_text("server_args={'api_key': '***', 'admin_api_key': 'Ab-c'}")
    (tmp_path / "logs" / "engine_1.log").write_text("server_args={'api_key': '***', 'admin_api_key': '***'}")
    (tmp_path / "config.yaml").write_text("token: hidden")
    assert resources.secrets.in_files(tmp_path) == [
        f"HF_TOKEN in {tmp_path / 'config.yaml'}",
        f"the key of an engine in {tmp_path / 'logs' / 'engine_0.log'}",
    ]
