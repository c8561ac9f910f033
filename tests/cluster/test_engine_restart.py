"""Failed engine restarts: each attempt ends at its deadline and is counted; the last one ends the run."""

from __future__ import annotations

import asyncio
import os
import re
import sys
from collections.abc import Coroutine
from pathlib import Path
from typing import Any, cast

import psutil
import pytest
from ray.exceptions import RayTaskError

from slime_like.cluster.workers.engine_actor import EngineActor
from slime_like.cluster.workers.engine_supervisor import RayEngineSupervisor
from slime_like.config.schema.faults import HealthConfig
from slime_like.config.schema.resolved import EngineSpec
from slime_like.config.schema.rollout import RolloutConfig
from slime_like.errors import EngineError, EngineLost
from slime_like.interfaces import EngineAddress
from slime_like.rollout.engine import server
from slime_like.rollout.engine.client import EngineClient
from slime_like.rollout.pool.engine_pool import DEAD, EnginePool
from slime_like.util.deadline import scale

START_S = 1.5
# Replaces the interpreter of the engine server: never listens, or listens and never answers.
SILENT = """#!{python} -IS
import json, socket, sys

with open(__file__ + ".listens") as file:
    listens = file.read() == "True"
launch = json.loads(sys.stdin.readline())
if listens:
    listener = socket.create_server((launch["host"], launch["port"]))
    listener.settimeout(60)
    connection, _ = listener.accept()
    print("was asked", flush=True)
sys.stdin.read()
"""


def connect(address: EngineAddress) -> EngineClient:
    """Return a client of the engine."""
    return EngineClient(address.url, admin_key=address.admin_key, name=address.name)


class Handle:
    """Fake Ray handle that calls the engine actor in this process and wraps errors as Ray does.

    The server of its first restart never listens; later ones listen but never answer.
    """

    def __init__(self, actor: EngineActor, listens: Path) -> None:
        self._actor, self._listens = actor, listens
        self.tries = 0
        self.restart = self

    async def _answer(self) -> Any:
        self.tries += 1
        self._listens.write_text(str(self.tries > 1))
        try:
            return await asyncio.to_thread(self._actor.restart)
        except Exception as error:
            raise RayTaskError("restart", "", error).as_instanceof_cause() from error

    def remote(self) -> Coroutine[Any, Any, Any]:
        return self._answer()


def spec(folder: Path) -> EngineSpec:
    return EngineSpec(
        model_path="none",
        device="cpu",
        dtype="float32",
        tp=1,
        context_length=8,
        seed=0,
        log_path=str(folder / "engine.log"),
        start_deadline_s=START_S,
        feeds_training=True,
    )


def test_an_engine_that_fails_every_restart_ends_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = tmp_path / "python"
    script.write_text(SILENT.replace("{python}", sys.executable))
    script.chmod(0o700)
    (listens := tmp_path / "python.listens").write_text("False")
    monkeypatch.setattr(sys, "executable", str(script))
    monkeypatch.setattr(server, "HEALTH_S", 60.0)  # longer than START_S, whose deadline ends the wait
    monkeypatch.setattr(server, "REPLACED_EXIT_S", 0.01)
    monkeypatch.setenv("SGLANG_SIMULATE_ACC_LEN", "3")
    actor = EngineActor("engine 0", spec(tmp_path), "key", str(tmp_path / "stacks"), {})
    environment = psutil.Process(actor._server.pid).environ()
    assert "SGLANG_SIMULATE_ACC_LEN" not in environment, "a node's own variables do not change what is sampled"

    async def error_of_loss() -> EngineError:
        address = EngineAddress("engine 0", "http://nowhere", "key", 1)
        handle = Handle(actor, listens)
        supervisor = RayEngineSupervisor(cast(Any, handle), address, RolloutConfig(start_deadline_s=START_S), connect)
        pool = EnginePool([supervisor], HealthConfig(max_restarts=2), receives_pushes=True)
        pool.mark_lost(pool.slots[0], DEAD, EngineLost("engine 0: connection broke"))
        with pytest.raises(EngineError) as error_info:
            await pool.wait_for_reachable()
        assert handle.tries == 2
        assert pool.slots[0].is_restarting
        await pool.stop()
        return error_info.value

    try:
        message = str(asyncio.run(error_of_loss()))
        log = (tmp_path / "engine.log").read_text()
        assert actor._server.alive(), "the actor's server stays until teardown"
    finally:
        actor.stop()
    limit = START_S * scale()
    assert "engine 0 was lost more than health.max_restarts=2 times within a rollout, the last time by" in message
    match = re.search(
        r"rollout waited (\d+) s for engine at http://\S+ \(log: \S+engine.log\) in phase 'engine start'", message
    )
    assert match is not None, message
    assert int(match[1]) < limit + 30
    assert f"(limit {limit:.0f} s" in message
    assert log.count("was asked") == 1


def test_a_stopped_server_is_replaced_by_a_restart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = tmp_path / "python"
    script.write_text(SILENT.replace("{python}", sys.executable))
    script.chmod(0o700)
    (tmp_path / "python.listens").write_text("False")
    address = EngineAddress("engine 0", "http://nowhere", "key", 1)
    monkeypatch.setattr(sys, "executable", str(script))
    monkeypatch.setattr(server, "REPLACED_EXIT_S", 0.01)
    monkeypatch.setattr(EngineActor, "ready", lambda self: address)
    actor = EngineActor("engine 0", spec(tmp_path), "key", str(tmp_path / "stacks"), {})
    try:
        actor.stop_server()
        assert not actor._server.alive()
        assert actor.stopped_pids() == ()
        with monkeypatch.context() as patch:
            patch.setattr(os, "killpg", lambda *_: pytest.fail("a signal was sent to the id of an ended process"))
            actor.inject_fault("SIGKILL")
        assert actor.restart() == (address, ""), "the actor's own signal is not how the engine ended"
        assert actor._server.alive()
    finally:
        actor.stop()
