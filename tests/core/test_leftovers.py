"""What the end-to-end tests call left behind: each kind of it, planted."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from uuid import uuid4

import pytest

from slime_like.deadline import Deadline
from tests.e2e import leftovers as module
from tests.e2e.leftovers import MARK, SHARED, Held, address_of, is_marked, leftovers, listening

LISTENS = """
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
    monkeypatch.setattr(module, "GONE_S", 0.0)
    return str(uuid4())


@pytest.fixture
def server(mark: str) -> Iterator[tuple[subprocess.Popen[str], int]]:
    """A process of the run, and the port that it listens on."""
    command, pipe = [sys.executable, "-c", LISTENS], subprocess.PIPE
    with subprocess.Popen(command, env=os.environ | {MARK: mark}, stdin=pipe, stdout=pipe, text=True) as process:
        assert process.stdout is not None
        yield process, int(process.stdout.readline())
        process.kill()


def test_a_process_that_lives_is_named_with_its_port(mark: str, server: tuple[subprocess.Popen[str], int]) -> None:
    process, port = server
    held = Held(mark)
    held.look()
    assert set(held.ports.values()) == {f"127.0.0.1:{port}"}
    first, second = leftovers(held, died=False)
    assert first.startswith(f"process {process.pid}: {sys.executable}")
    assert second == f"port 127.0.0.1:{port}: somebody listens"
    process.communicate()
    assert leftovers(held, died=False) == []


def test_a_port_is_found_though_its_process_was_never_seen(
    mark: str, server: tuple[subprocess.Popen[str], int]
) -> None:
    process, port = server
    held = Held(mark)
    held.look()
    unseen = Held("of another run", ports=held.ports)
    assert leftovers(unseen, died=False) == [f"port 127.0.0.1:{port}: somebody listens"]
    process.communicate()
    assert leftovers(unseen, died=False) == []


def test_what_is_being_taken_down_is_waited_for(
    mark: str, server: tuple[subprocess.Popen[str], int], monkeypatch: pytest.MonkeyPatch
) -> None:
    process, _ = server
    held = Held(mark)
    held.look()
    looks = iter((lambda: None, process.communicate))  # gone after the second look
    monkeypatch.setattr(module, "GONE_S", 30.0)
    monkeypatch.setattr(module, "time", SimpleNamespace(sleep=lambda _: next(looks)()))
    assert leftovers(Held("of another run", ports=held.ports), died=True) == []
    assert not list(looks)


def test_a_process_whose_title_is_written_over_its_mark_is_known(mark: str) -> None:
    """As Ray's agents are: while its parent lives as its child, and then as the one that was seen."""
    command, pipe = [sys.executable, "-c", PARENT], subprocess.PIPE
    held = Held(mark)
    with subprocess.Popen(command, env=os.environ | {MARK: mark}, stdin=pipe, stdout=pipe, text=True) as parent:
        assert parent.stdout is not None and parent.stdin is not None
        worker = int(parent.stdout.readline())
        ended = os.pidfd_open(worker)
        try:
            assert not is_marked(worker, mark)
            held.look()
            parent.kill()
            parent.wait()
            assert leftovers(held, died=False) == [f"process {worker}: ray::A"]
        finally:
            os.kill(worker, signal.SIGKILL)
            over, _, _ = select.select([ended], [], [], Deadline("test", "worker", 30).limit)
            os.close(ended)
            assert over
    assert leftovers(held, died=False) == []


def test_a_name_in_shared_memory_is_found(mark: str) -> None:
    path = SHARED / f"slime_like.test.{mark}"
    path.touch()
    try:
        assert leftovers(Held(mark, shared={path}), died=False) == [str(path)]
        assert leftovers(Held(mark, shared={path}), died=True) == [], "which the next part removes"
    finally:
        path.unlink()


def test_addresses_are_read_as_the_machine_writes_them() -> None:
    assert address_of("0100007F:1F90") == "127.0.0.1:8080"
    assert address_of("00000000000000000000000001000000:0016") == "::1:22"
    assert all(Path("/proc/net/tcp").exists() and inode > 0 for inode in listening())
