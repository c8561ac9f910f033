"""Requests to an engine whose node loses power: nothing closes the connections, so the kernel has to."""

from __future__ import annotations

import asyncio
import os
import sys
import threading
import time
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

import psutil
import pytest

from slime_like.errors import EngineLost
from slime_like.rollout.engine.client import EngineClient
from slime_like.util.deadline import FACTOR_VARIABLE, Deadline
from tests.nodes.machine import POLL_S, NamespaceNode, Network
from tests.power.silent_server import PORT

PEER_TIMEOUT_S = 2.0
LIMIT_S = 20.0
BODY = bytes(64 * 2**20)  # more than the buffers of a connection hold


def start_server(net: Network, folder: Path) -> tuple[NamespaceNode, Path]:
    """Start a silent server on a node of its own; return the node and the server's log."""
    node = net.add()
    log = folder / node.name
    node.start([sys.executable, "-m", "tests.power.silent_server", node.address], log, dict(os.environ))
    return node, log


def wait_for(log: Path, *lines: str) -> None:
    """Wait until the log has all ``lines``."""
    deadline = Deadline("test", "requests", LIMIT_S)
    while not {*lines} <= {*log.read_text().splitlines()}:
        deadline.remaining(f"{lines} in {log.read_text()}")
        time.sleep(POLL_S)


class Client(threading.Thread):
    """Event loop in the network of a node, with clients of two engines."""

    def __init__(self, node: NamespaceNode, first: NamespaceNode, second: NamespaceNode) -> None:
        super().__init__(daemon=True)
        self._network = Path("/var/run/netns") / node.name
        self._loop = asyncio.new_event_loop()
        self.engines = [
            EngineClient(f"http://{node.address}:{PORT}", admin_key="", deadline_s=60, peer_timeout_s=PEER_TIMEOUT_S)
            for node in (first, second)
        ]
        self.start()

    def run(self) -> None:
        """Enter the network, which is an attribute of the thread, and run the loop."""
        with self._network.open() as file:
            os.setns(file.fileno(), os.CLONE_NEWNET)
        self._loop.run_forever()

    def submit(self, request: Coroutine[Any, Any, Any]) -> Any:
        """Start a request; return its future."""
        return asyncio.run_coroutine_threadsafe(request, self._loop)

    def end(self) -> None:
        """Close the connections and end the thread."""
        for engine in self.engines:
            self.submit(engine.close()).result(LIMIT_S)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self.join(LIMIT_S)


def test_requests_to_a_node_without_power_end_and_those_to_a_stopped_engine_wait(
    net: Network, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(FACTOR_VARIABLE, "1")
    node = net.add()
    (lost_node, lost_log), (stopped_node, stopped_log) = (start_server(net, tmp_path) for _ in range(2))
    for log in (lost_log, stopped_log):
        wait_for(log, "ready")
    client = Client(node, lost_node, stopped_node)
    to_lost, to_stopped = client.engines
    waiting = client.submit(to_stopped.version())
    pending = [client.submit(to_lost.version()), client.submit(to_lost.update_from_tensors(BODY))]
    wait_for(stopped_log, "/model_info")
    wait_for(lost_log, "/model_info", "/update_weights_from_tensor")
    for process in psutil.Process(stopped_node.init).children(recursive=True):
        process.suspend()
    lost_node.disconnect()
    start = time.monotonic()
    pending.append(client.submit(to_lost.flush()))  # opens a connection
    for request in pending:
        with pytest.raises(EngineLost, match=lost_node.address):
            request.result(LIMIT_S)
    assert time.monotonic() - start < 4 * PEER_TIMEOUT_S
    time.sleep(max(0.0, start + 2 * PEER_TIMEOUT_S - time.monotonic()))
    assert not waiting.done()
    waiting.cancel()
    client.end()
