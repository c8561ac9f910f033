"""Start of a local Ray: retried on a busy machine, and a clear error if it never comes up."""

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
from types import SimpleNamespace
from typing import Any

import pytest
import ray
from ray import _raylet as ray_core
from ray._private import ray_constants
from ray._private import utils as ray_utils
from ray._private import worker as ray_worker

from slime_like.cluster.plan.machine import Machine, described_machine
from slime_like.cluster.plan.planner import make_plan
from slime_like.cluster.plan.ray_cluster import ClusterNode
from slime_like.cluster.start import agent_stand_ins, local_ray, placement
from slime_like.cluster.supervise import driver_link
from slime_like.config.load.loader import load_config
from slime_like.errors import ConfigError, DeadlineExceeded
from slime_like.util.deadline import scale

real_init, real_shutdown = ray.init, ray.shutdown
LATE = Exception("The current node timed out during startup. This could happen because ...")


@pytest.fixture(autouse=True)
def restored_ray(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(ray_constants, "ENABLE_RAY_CLUSTER", ray_constants.ENABLE_RAY_CLUSTER)
    monkeypatch.setattr(os, "environ", os.environ.copy())
    monkeypatch.setattr(ray, "shutdown", lambda: None)
    monkeypatch.setattr(ray_worker, "_global_node", None)
    yield
    monkeypatch.setattr(ray, "shutdown", lambda: None)
    local_ray.shutdown()


def outcomes(monkeypatch: pytest.MonkeyPatch, *errors: Exception | None) -> list[Any]:
    calls, remaining = list[Any](), list(errors)

    def init(**arguments: Any) -> None:
        calls.append(arguments)
        error = remaining.pop(0) if len(remaining) > 1 else remaining[0]
        if error is not None:
            raise error

    monkeypatch.setattr(ray, "init", init)
    return calls


def test_a_node_that_is_late_is_started_again(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = outcomes(monkeypatch, LATE, LATE, None)
    local_ray.start("name")
    assert [call["namespace"] for call in calls] == ["name"] * 3


def test_a_node_that_never_starts_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    outcomes(monkeypatch, LATE)
    monkeypatch.setattr(local_ray, "SECONDS", 1e-3)
    with pytest.raises(DeadlineExceeded, match=r"driver waited .* for the node of Ray that it started"):
        local_ray.start("name")


def test_another_failure_is_not_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = outcomes(monkeypatch, ValueError("no such port"))
    with pytest.raises(ValueError, match="no such port"):
        local_ray.start("name")
    assert len(calls) == 1


def test_rays_folder_is_private_and_removed_at_shutdown(monkeypatch: pytest.MonkeyPatch) -> None:
    (call,) = [outcomes(monkeypatch, None)]
    local_ray.start("name")
    folder = Path(call[0]["_temp_dir"])
    assert (folder.name, folder.parent.stat().st_mode & 0o777) == ("ray", 0o700)
    logs = folder / "session_2000-01-01_00-00-00_000000_1" / "logs"
    logs.mkdir(parents=True)
    assert local_ray.log_dir() == logs, "known even if the node did not come up"
    local_ray.shutdown()
    assert not folder.parent.exists() and local_ray.log_dir() is None


@pytest.mark.parametrize("variable", ["TMPDIR", "RAY_TMPDIR"])
def test_rays_sockets_have_short_paths(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, variable: str) -> None:
    calls = outcomes(monkeypatch, None)
    long = tmp_path / ("long" * 20)
    long.mkdir()
    with tempfile.TemporaryDirectory(prefix="s") as short:
        for folder in (long, Path(short)):
            monkeypatch.setattr(tempfile, "tempdir", None)
            monkeypatch.setenv(variable, str(folder))
            local_ray.start("name")
        parents = [Path(call["_temp_dir"]).parents[1] for call in calls]
        local_ray.shutdown()
    assert parents[1] == Path(short) and parents[0] != long
    session = "session_2026-11-22_22-22-12_659947_4194304"  # pid_max of the kernel
    name = f"{parents[1]}/{local_ray.PREFIX}12345678/ray/{session}/sockets/plasma_store"
    assert len(name) == len(str(parents[1])) + local_ray.ADDED_BYTES


def test_an_unwritable_folder_for_rays_files_names_the_fix(monkeypatch: pytest.MonkeyPatch) -> None:
    outcomes(monkeypatch, None)
    monkeypatch.setenv("RAY_TMPDIR", "/proc/nowhere")
    with pytest.raises(ConfigError, match=r"Ray's files cannot be stored in /proc/nowhere \(.*\): set TMPDIR"):
        local_ray.start("name")


def test_an_unreachable_cluster_is_reported_before_ray_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = outcomes(monkeypatch, None)
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    for address, reason in (
        (f"127.0.0.1:{port}", "refused"),
        (f"ray://127.0.0.1:{port}", "refused"),
        ("nonsense", "Invalid address"),
    ):
        with pytest.raises(
            ConfigError, match=rf"placement.ray_address='{address}': no Ray cluster answers at .*{reason}"
        ):
            local_ray.join(address, "name")
    assert calls == []


def test_a_signal_ends_the_wait_for_an_unreachable_cluster(monkeypatch: pytest.MonkeyPatch) -> None:
    """The connection attempt is part of a call during which the supervisor ends the run at a signal."""
    events: list[str] = []

    def connect(*_: object, **__: object) -> None:
        events.append("connects")
        raise TimeoutError("timed out")

    def send(kind: str, **message: Any) -> None:
        events.append(f"{kind} at_once" if message.get("at_once") else kind)

    monkeypatch.setattr(socket, "create_connection", connect)
    monkeypatch.setattr(driver_link, "_send", send)
    with pytest.raises(ConfigError, match=r"no Ray cluster answers at 10\.0\.0\.1:6379 \(timed out\)"):
        local_ray.join("10.0.0.1:6379", "name")
    assert events == ["call_begins at_once", "connects", "call_ends"]


def test_sigterm_handler_is_kept_during_start(monkeypatch: pytest.MonkeyPatch) -> None:
    received: list[int] = []

    def init(**_: Any) -> None:
        ray_utils.set_sigterm_handler(lambda *_: sys.exit(15))
        signal.raise_signal(signal.SIGTERM)
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(15))  # like Ray's C handler, which cannot be prevented

    monkeypatch.setattr(ray, "init", init)
    before = signal.signal(signal.SIGTERM, lambda number, _: received.append(number))
    try:
        local_ray.start("name")
        signal.raise_signal(signal.SIGTERM)
    finally:
        signal.signal(signal.SIGTERM, before)
    assert received == [signal.SIGTERM] * 2
    assert inspect.signature(ray_utils.set_sigterm_handler).parameters, "Ray's own function is restored"
    assert "ray._private.utils.set_sigterm_handler(" in inspect.getsource(inspect.unwrap(real_init))


class Node:
    """Fake Ray node: it stops its processes after the core worker and its SIGTERM handler are gone."""

    def __init__(self, events: list[str]) -> None:
        self.events = events

    def kill_all_processes(self, *, wait: bool) -> None:
        assert not wait
        signal.raise_signal(signal.SIGTERM)
        self.events.append("taken down")


def test_sigterm_handler_is_kept_during_shutdown(monkeypatch: pytest.MonkeyPatch) -> None:
    events: list[str] = []

    def shutdown() -> None:
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(15))
        node.kill_all_processes(wait=False)
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(15))

    monkeypatch.setattr(ray, "shutdown", shutdown)
    monkeypatch.setattr(ray_worker, "_global_node", node := Node(events))
    before = signal.signal(signal.SIGTERM, lambda *_: events.append("handled"))
    try:
        local_ray.shutdown()
        signal.raise_signal(signal.SIGTERM)
    finally:
        signal.signal(signal.SIGTERM, before)
    assert events == ["handled", "taken down", "handled"]
    assert "_global_node.kill_all_processes(" in inspect.getsource(inspect.unwrap(real_shutdown))


REAL = """
import os, pathlib, signal, sys
import psutil
import ray
from ray._private import worker
from slime_like.cluster.start import local_ray
from slime_like.cluster.supervise import process_tree

signal.signal(signal.SIGTERM, lambda *_: print("handled", flush=True))
local_ray.start("signals")
node = worker._global_node
folder = pathlib.Path(node.get_temp_dir_path()).parent
assert folder.stat().st_mode & 0o777 == 0o700, "Ray's sockets are this user's"
assert all(pathlib.Path(path).parents[3] == folder for path in (node.plasma_store_socket_name, node.raylet_socket_name))
token = os.environ["RAY_AUTH_TOKEN"].encode()
assert set(node.all_processes) == set(local_ray.ESSENTIAL), node.all_processes
for infos in node.all_processes.values():
    for info in infos:
        proc = pathlib.Path(f"/proc/{info.process.pid}")
        assert token in (proc / "environ").read_bytes(), "its token"
        assert token not in (proc / "cmdline").read_bytes(), "is nobody else's"
raylet = psutil.Process(node.all_processes["raylet"][0].process.pid)
agents = {name: psutil.Process(pid) for name, pid in process_tree.ray_agents(raylet).items()}
assert agents.keys() == process_tree.RAY_AGENTS.keys(), agents
assert all(str(local_ray.STAND_INS) in agent.cmdline() for agent in agents.values())
# The driver imports nothing of the dashboard either.
assert not {"aiohttp", "opencensus", "prometheus_client", "ray.dashboard"} & sys.modules.keys()

@ray.remote(num_cpus=0, runtime_env={"env_vars": {"OF_A_USER": "1"}})
def read_variable():
    return os.environ["OF_A_USER"]

assert ray.get(read_variable.remote(), timeout=60) == "1", "the stand-in becomes the agent at the first request"
assert str(local_ray.STAND_INS) not in agents["runtime-env agent"].cmdline()
(reported,) = local_ray.nodes()
assert reported.num_cpus and reported.memory_bytes > 2**28 and not reported.num_gpus, reported
take_down = node.kill_all_processes

def signalled(*arguments, **options):
    os.kill(os.getpid(), signal.SIGTERM)
    take_down(*arguments, **options)

node.kill_all_processes = signalled
local_ray.shutdown()
assert not folder.exists(), "and go with it"
assert psutil.wait_procs(agents.values(), timeout=60)[1] == [], "agents end with their raylet"
os.kill(os.getpid(), signal.SIGTERM)
"""


@pytest.mark.slow
def test_sigterm_handler_is_kept_with_a_real_ray() -> None:
    environment = os.environ | {"HOME": "/proc/home"}  # otherwise Ray writes its token there, readable for every user
    result = subprocess.run(
        [sys.executable, "-c", REAL],
        capture_output=True,
        text=True,
        timeout=300 * scale(),
        check=False,
        env=environment,
    )
    assert (result.returncode, result.stdout) == (0, "handled\n" * 2), result.stderr


def test_the_stand_ins_publish_the_ports_that_the_raylet_waits_for(tmp_path: Path) -> None:
    node_id = "0" * 56
    options = agent_stand_ins.named_options(["agent.py", f"--node-id={node_id}", f"--session-dir={tmp_path}", "--head"])
    services = dict.fromkeys(agent_stand_ins.SERVICES, agent_stand_ins.NO_SERVICE)
    agent_stand_ins.publish(options, services | {agent_stand_ins.PORT: 5})
    names = ("METRICS_AGENT", "METRICS_EXPORT", "DASHBOARD_AGENT_LISTEN", "RUNTIME_ENV_AGENT")
    raylet: Any = ray_core
    ports = [
        raylet.wait_for_persisted_port(str(tmp_path), node_id, getattr(raylet, f"{name}_PORT_NAME"), 10)
        for name in names
    ]
    assert ports == [-1, -1, -1, 5]
    assert len(list(tmp_path.iterdir())) == 4


def test_rays_message_for_a_late_node_is_unchanged() -> None:
    from ray._private import node

    assert node.__file__ is not None
    with open(node.__file__) as source:
        assert local_ray.TIMEOUT_TEXT in source.read()


def test_a_joined_cluster_is_checked_before_anything_is_reserved(monkeypatch: pytest.MonkeyPatch) -> None:
    address = "placement.ray_address=10.0.0.1:6379"
    wait = "placement.wait_deadline_s=1e-3"
    cfg = load_config(["+recipe=qwen3_4b_gsm8k", address, "placement.device=cuda", wait], files=False, machine=False)
    plan = make_plan(cfg, described_machine("8xH200"))
    joined_processes: list[str] = []
    monkeypatch.setattr(local_ray, "join", lambda address, _: joined_processes.append(address))
    monkeypatch.setattr(local_ray, "nodes", lambda: (ClusterNode("10.0.0.1", 4, 64, 2**40, "H200"),))
    monkeypatch.setattr(placement, "placement_group", lambda *_, **__: pytest.fail("nothing may be reserved"))
    monkeypatch.setattr(
        placement, "NodeRequest", lambda *_: SimpleNamespace(renew=lambda _: None, withdraw=lambda: None)
    )
    with pytest.raises(ConfigError, match=r"needs 8 GPUs .* the nodes have 4"):
        placement.Placement(cfg, plan, "stacks", lambda _: None).open()
    assert joined_processes == ["10.0.0.1:6379"]


@pytest.mark.parametrize("has_token", [True, False])
def test_a_joined_cluster_without_a_token_is_reported(has_token: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    overrides = ["+recipe=quickstart", "placement.device=cpu", "placement.ray_address=10.0.0.1:6379"]
    cfg = load_config(overrides, files=False, machine=False)
    plan = make_plan(cfg, Machine(0, 4, 2**36, ()))
    monkeypatch.setattr(local_ray, "join", lambda *_: None)
    monkeypatch.setattr(local_ray, "nodes", lambda: (ClusterNode("10.0.0.1", 0, 4, 2**36),))
    monkeypatch.setattr(local_ray, "is_token_auth_enabled", lambda: has_token)
    warnings = placement.Placement(cfg, plan, "stacks", lambda _: None).open().warnings
    assert [text.split(", so")[0] for text in warnings] == [
        "the Ray cluster at placement.ray_address='10.0.0.1:6379' requires no token"
    ] * (not has_token)
