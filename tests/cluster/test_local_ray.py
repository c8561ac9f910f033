"""Ray that is late on a busy machine is started again, and named when it never comes."""

from __future__ import annotations

import inspect
import os
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import ray
from ray._private import ray_constants
from ray._private import utils as ray_utils
from ray._private import worker as ray_worker

from slime_like.cluster.start import local_ray
from slime_like.errors import ConfigError, DeadlineExceeded

real_init, real_shutdown = ray.init, ray.shutdown
LATE = Exception("The current node timed out during startup. This could happen because ...")


@pytest.fixture(autouse=True)
def ray_as_it_was(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(ray_constants, "ENABLE_RAY_CLUSTER", ray_constants.ENABLE_RAY_CLUSTER)
    monkeypatch.setattr(os, "environ", os.environ.copy())
    monkeypatch.setattr(ray, "shutdown", lambda: None)
    monkeypatch.setattr(ray_worker, "_global_node", None)
    yield
    monkeypatch.setattr(ray, "shutdown", lambda: None)
    local_ray.shutdown()


def outcomes(monkeypatch: pytest.MonkeyPatch, *errors: Exception | None) -> list[Any]:
    calls, left = list[Any](), list(errors)

    def init(**arguments: Any) -> None:
        calls.append(arguments)
        error = left.pop(0) if len(left) > 1 else left[0]
        if error is not None:
            raise error

    monkeypatch.setattr(ray, "init", init)
    return calls


def test_a_node_that_is_late_is_started_again(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = outcomes(monkeypatch, LATE, LATE, None)
    local_ray.start("name")
    assert [call["namespace"] for call in calls] == ["name"] * 3


def test_one_that_never_comes_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    outcomes(monkeypatch, LATE)
    monkeypatch.setattr(local_ray, "SECONDS", 1e-3)
    with pytest.raises(DeadlineExceeded, match=r"driver waited .* for the node of Ray that it started"):
        local_ray.start("name")


def test_another_failure_is_not_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = outcomes(monkeypatch, ValueError("no such port"))
    with pytest.raises(ValueError, match="no such port"):
        local_ray.start("name")
    assert len(calls) == 1


def test_nobody_else_can_enter_rays_folder_which_goes_with_it(monkeypatch: pytest.MonkeyPatch) -> None:
    (call,) = [outcomes(monkeypatch, None)]
    local_ray.start("name")
    folder = Path(call[0]["_temp_dir"])
    assert (folder.name, folder.parent.stat().st_mode & 0o777) == ("ray", 0o700)
    logs = folder / "session_2000-01-01_00-00-00_000000_1" / "logs"
    logs.mkdir(parents=True)
    assert local_ray.log_dir() == logs, "also of a node that did not come up"
    local_ray.shutdown()
    assert not folder.parent.exists() and local_ray.log_dir() is None


@pytest.mark.parametrize("variable", ["TMPDIR", "RAY_TMPDIR"])
def test_rays_sockets_have_short_paths(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, variable: str) -> None:
    calls = outcomes(monkeypatch, None)
    long = tmp_path / ("long" * 20)
    long.mkdir()
    with tempfile.TemporaryDirectory(prefix="s") as short:
        for place in (long, Path(short)):
            monkeypatch.setattr(tempfile, "tempdir", None)
            monkeypatch.setenv(variable, str(place))
            local_ray.start("name")
        where = [Path(call["_temp_dir"]).parents[1] for call in calls]
        local_ray.shutdown()
    assert where[1] == Path(short) and where[0] != long
    session = "session_2026-11-22_22-22-12_659947_4194304"  # pid_max of the kernel
    name = f"{where[1]}/{local_ray.PREFIX}12345678/ray/{session}/sockets/plasma_store"
    assert len(name) == len(str(where[1])) + local_ray.ADDED_BYTES


def test_without_a_place_for_rays_files_the_fix_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    outcomes(monkeypatch, None)
    monkeypatch.setenv("RAY_TMPDIR", "/proc/nowhere")
    with pytest.raises(ConfigError, match=r"Ray's files cannot be kept in /proc/nowhere \(.*\): set TMPDIR"):
        local_ray.start("name")


def test_a_cluster_that_is_not_there_is_named_before_ray_waits_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = outcomes(monkeypatch, None)
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    for address, why in (
        (f"127.0.0.1:{port}", "refused"),
        (f"ray://127.0.0.1:{port}", "refused"),
        ("nonsense", "Invalid address"),
    ):
        with pytest.raises(ConfigError, match=rf"placement.ray_address='{address}': no Ray cluster answers at .*{why}"):
            local_ray.join(address, "name")
    assert calls == []


def test_sigterm_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    found: list[int] = []

    def init(**_: Any) -> None:
        ray_utils.set_sigterm_handler(lambda *_: sys.exit(15))
        signal.raise_signal(signal.SIGTERM)
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(15))  # as the handler in C, which nothing holds back

    monkeypatch.setattr(ray, "init", init)
    before = signal.signal(signal.SIGTERM, lambda number, _: found.append(number))
    try:
        local_ray.start("name")
        signal.raise_signal(signal.SIGTERM)
    finally:
        signal.signal(signal.SIGTERM, before)
    assert found == [signal.SIGTERM] * 2
    assert inspect.signature(ray_utils.set_sigterm_handler).parameters, "Ray's own again"
    assert "ray._private.utils.set_sigterm_handler(" in inspect.getsource(inspect.unwrap(real_init))


class Node:
    """As Ray's: it takes down its processes when its core is gone, and with that whatever had taken SIGTERM."""

    def __init__(self, told: list[str]) -> None:
        self.told = told

    def kill_all_processes(self, *, wait: bool) -> None:
        assert not wait
        signal.raise_signal(signal.SIGTERM)
        self.told.append("taken down")


def test_sigterm_is_left_alone_while_ray_goes(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[str] = []

    def shutdown() -> None:
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(15))
        node.kill_all_processes(wait=False)
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(15))

    monkeypatch.setattr(ray, "shutdown", shutdown)
    monkeypatch.setattr(ray_worker, "_global_node", node := Node(told))
    before = signal.signal(signal.SIGTERM, lambda *_: told.append("handled"))
    try:
        local_ray.shutdown()
        signal.raise_signal(signal.SIGTERM)
    finally:
        signal.signal(signal.SIGTERM, before)
    assert told == ["handled", "taken down", "handled"]
    assert "_global_node.kill_all_processes(" in inspect.getsource(inspect.unwrap(real_shutdown))


REAL = """
import os, pathlib, signal
from ray._private import worker
from slime_like.cluster.start import local_ray

signal.signal(signal.SIGTERM, lambda *_: print("handled", flush=True))
local_ray.start("signals")
node = worker._global_node
folder = pathlib.Path(node.get_temp_dir_path()).parent
assert folder.stat().st_mode & 0o777 == 0o700, "Ray's sockets are this user's"
assert all(pathlib.Path(path).parents[3] == folder for path in (node.plasma_store_socket_name, node.raylet_socket_name))
token = os.environ["RAY_AUTH_TOKEN"].encode()
for infos in node.all_processes.values():
    for info in infos:
        proc = pathlib.Path(f"/proc/{info.process.pid}")
        assert token in (proc / "environ").read_bytes(), "its token"
        assert token not in (proc / "cmdline").read_bytes(), "is nobody else's"
take_down = node.kill_all_processes

def signalled(*arguments, **options):
    os.kill(os.getpid(), signal.SIGTERM)
    take_down(*arguments, **options)

node.kill_all_processes = signalled
local_ray.shutdown()
assert not folder.exists(), "and go with it"
os.kill(os.getpid(), signal.SIGTERM)
"""


@pytest.mark.slow
def test_sigterm_is_left_alone_while_a_real_one_goes() -> None:
    environment = os.environ | {"HOME": "/proc/home"}  # Ray would write its token there, for everybody to read
    done = subprocess.run(
        [sys.executable, "-c", REAL], capture_output=True, text=True, timeout=300, check=False, env=environment
    )
    assert (done.returncode, done.stdout) == (0, "handled\n" * 2), done.stderr


def test_rays_own_words_for_a_late_node_are_the_ones_we_know() -> None:
    from ray._private import node

    assert node.__file__ is not None
    with open(node.__file__) as source:
        assert local_ray.LATE in source.read()
