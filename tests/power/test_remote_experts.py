"""A worker of remote experts whose engine's node loses power serves the next engine, although nothing closes the connection."""

from __future__ import annotations

import contextlib
import os
import socket
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from slime_like.util.deadline import FACTOR_VARIABLE
from slime_like_plugins.remote_experts import connection, key
from slime_like_plugins.remote_experts.client import ClientSettings, WorkerClient
from slime_like_plugins.remote_experts.process import WorkerOrigin, connect
from tests.nodes.machine import NamespaceNode, Network
from tests.remote_experts.workers import SHAPES, accept_all, private_key

PORT = 9010
PEER_TIMEOUT_S = 2.0
LIMIT_S = 20.0


def in_network[Result](node: NamespaceNode, call: Callable[[], Result]) -> Result:
    """Return the result of ``call`` in the network of a node, to which the sockets that it opens belong."""
    results: list[Result] = []

    def run() -> None:
        with (Path("/var/run/netns") / node.name).open() as file:
            os.setns(file.fileno(), os.CLONE_NEWNET)
        results.append(call())

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(2 * LIMIT_S)
    (result,) = results
    return result


def test_a_worker_serves_the_next_engine_after_the_first_one_lost_power(
    net: Network, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(FACTOR_VARIABLE, "1")
    monkeypatch.setattr(connection, "PEER_TIMEOUT_S", PEER_TIMEOUT_S)
    monkeypatch.setattr(key, "PROOF_S", 0.5)
    worker, lost_node, other_node = (net.add() for _ in range(3))
    origin = WorkerOrigin(f"{worker.address}:{PORT}", private_key(tmp_path))
    settings = ClientSettings(transport="socket")

    def open_client() -> WorkerClient:
        client = WorkerClient(connect(origin, "the worker", LIMIT_S), settings)
        client.open(SHAPES)
        return client

    with in_network(worker, lambda: socket.create_server((worker.address, PORT))) as listener:
        secret = key.read_key(tmp_path / "key")
        threading.Thread(target=accept_all, args=(listener, secret), daemon=True).start()
        with contextlib.closing(in_network(lost_node, open_client)):
            lost_node.disconnect()
            start = time.monotonic()
            in_network(other_node, open_client).close()
            assert PEER_TIMEOUT_S / 2 < time.monotonic() - start < 4 * PEER_TIMEOUT_S
        listener.shutdown(socket.SHUT_RDWR)
