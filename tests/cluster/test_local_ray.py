"""Ray that is late on a busy machine is started again, and named when it never comes."""

from __future__ import annotations

import inspect
import os
import signal
import subprocess
import sys
from typing import Any

import pytest
import ray
from ray._private import ray_constants
from ray._private import utils as ray_utils
from ray._private import worker as ray_worker

from slime_like.cluster import local_ray
from slime_like.errors import DeadlineExceeded

real_init, real_shutdown = ray.init, ray.shutdown
LATE = Exception("The current node timed out during startup. This could happen because ...")


@pytest.fixture(autouse=True)
def ray_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray_constants, "ENABLE_RAY_CLUSTER", ray_constants.ENABLE_RAY_CLUSTER)
    monkeypatch.setattr(os, "environ", os.environ.copy())
    monkeypatch.setattr(ray, "shutdown", lambda: None)
    monkeypatch.setattr(ray_worker, "_global_node", None)


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
import os, signal
from ray._private import worker
from slime_like.cluster import local_ray

signal.signal(signal.SIGTERM, lambda *_: print("handled", flush=True))
local_ray.start("signals")
node = worker._global_node
take_down = node.kill_all_processes

def signalled(*arguments, **options):
    os.kill(os.getpid(), signal.SIGTERM)
    take_down(*arguments, **options)

node.kill_all_processes = signalled
local_ray.shutdown()
os.kill(os.getpid(), signal.SIGTERM)
"""


def test_sigterm_is_left_alone_while_a_real_one_goes() -> None:
    done = subprocess.run([sys.executable, "-c", REAL], capture_output=True, text=True, timeout=300, check=False)
    assert (done.returncode, done.stdout) == (0, "handled\n" * 2), done.stderr


def test_rays_own_words_for_a_late_node_are_the_ones_we_know() -> None:
    from ray._private import node

    assert node.__file__ is not None
    with open(node.__file__) as source:
        assert local_ray.LATE in source.read()
