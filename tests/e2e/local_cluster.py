"""Ray cluster of several nodes on this machine, with loopback addresses and a token, and scripts/submit.py on it."""

from __future__ import annotations

import asyncio
import os
import secrets
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from slime_like.cluster.jobs.address import server_address
from slime_like.cluster.jobs.server import JobServer
from slime_like.errors import SlimeLikeError
from slime_like.util.deadline import Deadline
from tests.e2e.leftovers import MARK, RunResources, command, living_processes
from tests.e2e.runs import REPOSITORY

START_S, END_S = 60.0, 30.0
RAY = str(Path(sys.executable).with_name("ray"))


@dataclass(slots=True)
class LocalCluster:
    """Nodes, and the environment with which their jobs are submitted."""

    folder: Path
    gcs_port: int
    dashboard_port: int
    token: str = field(default_factory=lambda: secrets.token_hex(16))
    resources: RunResources = field(default_factory=lambda: RunResources(f"cluster.{os.getpid()}", living_processes()))
    nodes: list[subprocess.Popen[bytes]] = field(default_factory=list[subprocess.Popen[bytes]])

    @property
    def environment(self) -> dict[str, str]:
        """Return the environment of commands on the cluster."""
        address = {"RAY_API_SERVER_ADDRESS": f"http://127.0.0.1:{self.dashboard_port}"}
        return {**os.environ, "RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": self.token, **address}

    def start(self, *arguments: str) -> None:
        """Start a node, which ends with its process."""
        log = (self.folder / f"node{len(self.nodes)}.log").open("wb")
        ip = f"--node-ip-address=127.0.0.{len(self.nodes) + 2}"
        environment = {**self.environment, "RAY_TMPDIR": str(self.folder), MARK: self.resources.mark}
        # Another cluster may use Ray's default port.
        agent_port = f"--dashboard-agent-listen-port={free_ports(1)[0]}"
        own = [ip, agent_port, "--min-worker-port=0", "--max-worker-port=0", "--num-cpus=4"]
        # Runs do not ask Ray for the logs of their workers.
        service_flags = ["--include-log-monitor=false", "--disable-usage-stats"]
        words = [RAY, "start", *arguments, *own, *service_flags, "--block"]
        with log:
            self.nodes.append(subprocess.Popen(words, stdout=log, stderr=subprocess.STDOUT, env=environment, cwd="/"))

    def submit(self, *arguments: str) -> subprocess.Popen[str]:
        """Start scripts/submit.py."""
        words = [sys.executable, str(REPOSITORY / "scripts" / "submit.py"), *arguments]
        return subprocess.Popen(
            words, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=self.environment, cwd=self.folder
        )

    def end(self) -> list[str]:
        """End the nodes, kill the processes that remain, and return a line for each of these."""
        self.resources.processes()
        for node in reversed(self.nodes):
            node.terminate()
            node.wait(END_S)
        deadline = Deadline("test", "the end of the cluster", END_S)
        while (pids := self.resources.processes()) and deadline.elapsed() < deadline.limit:
            time.sleep(0.2)
        lines = [f"process {pid}: {command(pid)}" for pid in pids]
        for pid in pids:
            os.kill(pid, signal.SIGKILL)
        return lines


@contextmanager
def local_cluster(folder: Path) -> Generator[LocalCluster]:
    """Start a head and another node; end both, and assert that none of their processes remains."""
    gcs_port, dashboard_port, client_port = free_ports(3)
    cluster = LocalCluster(folder, gcs_port, dashboard_port)
    head = (
        "--head",
        f"--port={gcs_port}",
        f"--dashboard-port={dashboard_port}",
        f"--ray-client-server-port={client_port}",
        "--no-monitor",  # runs do not use Ray's autoscaler
    )
    try:
        cluster.start(*head)
        _wait_for_nodes(cluster, 1)
        cluster.start(f"--address=127.0.0.2:{cluster.gcs_port}")
        _wait_for_nodes(cluster, 2)
        yield cluster
    finally:
        remaining = cluster.end()
    assert not remaining


def _wait_for_nodes(cluster: LocalCluster, count: int) -> None:
    """Wait until the job server lists ``count`` nodes."""

    async def num_nodes() -> int:
        async with JobServer(server_address(None, cluster.environment)) as server:
            return len(await server.nodes())

    deadline = Deadline("test", "cluster", START_S)
    while True:
        try:
            if asyncio.run(num_nodes()) >= count:
                return
        except SlimeLikeError:
            pass
        time.sleep(min(0.3, deadline.remaining(f"{count} nodes")))


def free_ports(count: int) -> list[int]:
    """Return distinct ports that were free when they were checked."""
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    try:
        return [listener.getsockname()[1] for listener in sockets]
    finally:
        for listener in sockets:
            listener.close()
