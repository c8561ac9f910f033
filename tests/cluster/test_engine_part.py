"""Part of an engine on one of its nodes, which ends when the process of a rank ends."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, BinaryIO

import pytest

from slime_like.cluster.workers import engine_part
from slime_like.cluster.workers.engine_part import EnginePart
from slime_like.config.schema.resolved import EngineSpec
from slime_like.rollout.engine import processes
from slime_like.rollout.engine.node import EngineNode
from slime_like.rollout.engine.server import EngineServer


class SleepingServer(EngineServer):
    """Server without SGLang. Its process never waits for its child; child and grandchild have the title of a rank."""

    def _spawn(self, log: BinaryIO, environment: dict[str, str]) -> subprocess.Popen[bytes]:
        child = "(exec -a sglang::scheduler_TP2 sleep 100) & exec -a sglang::scheduler_TP2 sleep 100"
        script = f"(exec -a sglang::scheduler_TP2 bash -c '{child}') & exec sleep 100"
        return subprocess.Popen(["bash", "-c", script], stdin=subprocess.PIPE, stdout=log, start_new_session=True)

    def wait_ready(self) -> None:
        while len(processes.pids_of_part(self.pid, "scheduler")) < 2:
            assert self.alive()
            time.sleep(0.01)


@pytest.fixture
def servers(monkeypatch: pytest.MonkeyPatch) -> list[SleepingServer]:
    servers: list[SleepingServer] = []

    def create(*arguments: Any, **settings: Any) -> SleepingServer:
        servers.append(SleepingServer(*arguments, **settings))
        return servers[-1]

    monkeypatch.setattr(engine_part, "prepare_process", lambda *_: None)
    monkeypatch.setattr(engine_part, "get_node_ip_address", lambda: "127.0.0.1")
    monkeypatch.setattr(engine_part, "EngineServer", create)
    return servers


@pytest.mark.parametrize("is_stopped", [False, True])
def test_a_part_ends_with_each_of_its_ranks(tmp_path: Path, servers: list[SleepingServer], is_stopped: bool) -> None:
    spec = EngineSpec("model", "cpu", "float32", 4, 64, 3, str(tmp_path / "engine_0_node1.log"), 60.0, num_nodes=2)
    node = EngineNode(1, ("10.0.0.1", "10.0.0.2"), "10.0.0.1:1")
    part = EnginePart("engine 0 node 1", spec, "key", "stacks", {}, node)
    (server,) = servers
    with ThreadPoolExecutor(1) as pool:
        try:
            part.ready()
            (pid,) = processes.rank_pids(server.pid)
            (child,) = set(processes.pids_of_part(server.pid, "scheduler")) - {pid}
            end = pool.submit(part.wait_for_end)
            os.kill(child, signal.SIGKILL)
            with pytest.raises(TimeoutError):
                end.result(0.3)
            if is_stopped:
                part.stop()
                assert end.result(20) == ""
            else:
                os.kill(pid, signal.SIGKILL)
                assert f"the process of a rank (pid {pid}) has ended; engine at http" in end.result(20)
            assert not server.alive()
        finally:
            part.stop()
