"""A Ray cluster of two or three nodes on one machine (``machine``), and runs of train.py on its first node."""

from __future__ import annotations

import itertools
import os
import re
import secrets
import subprocess
import sys
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from slime_like.util.deadline import Deadline
from tests.e2e.worker_server import forking_workers
from tests.nodes.machine import LOCAL, POLL_S, NamespaceNode, Network, network

REPOSITORY = Path(__file__).resolve().parents[2]
PORT = 6379
START_S = 60.0
RUN_S = 150.0
_run_numbers = itertools.count()
# Ray notices the loss of a node within three seconds instead of 50.
FAST_CHECKS = {
    "RAY_health_check_initial_delay_ms": "1000",
    "RAY_health_check_period_ms": "1000",
    "RAY_health_check_timeout_ms": "1000",
    "RAY_health_check_failure_threshold": "3",
}


@dataclass(slots=True)
class RayNodes:
    """Nodes with a raylet each; the first one is the head."""

    net: Network
    folder: Path
    num_gpus: int  # number of GPUs that each node claims to have
    environment: dict[str, str] = field(default_factory=dict[str, str])

    @property
    def nodes(self) -> list[NamespaceNode]:
        """All nodes, the head first."""
        return self.net.nodes

    @property
    def address(self) -> str:
        """Address for ``placement.ray_address``."""
        return f"{self.nodes[0].address}:{PORT}"

    def log(self, node: NamespaceNode) -> Path:
        """Return the log of a node's raylet."""
        return self.folder / f"{node.name}.log"

    def start(self, *nodes: NamespaceNode) -> None:
        """Start the raylets of ``nodes``, which may have been killed before, and wait until they are ready."""
        for node in nodes:
            node.connect()
            self.log(node).write_text("")
            command = [sys.executable, "-m", "tests.nodes.raylet", node.address, self.address, "4", str(self.num_gpus)]
            node.start([*command, str(LOCAL / "ray")], self.log(node), self.environment)
        deadline = Deadline("test", "start of a node", START_S)
        for node in nodes:
            while "ready" not in (text := self.log(node).read_text()):
                assert node.alive(), f"{node.name}: {text}"
                deadline.remaining(f"{node.name}: {text[-2000:]}")
                time.sleep(POLL_S)


@contextmanager
def ray_nodes(count: int, folder: Path, *, num_gpus: int = 0) -> Generator[RayNodes]:
    """Start a cluster of ``count`` nodes, yield it, and remove it."""
    environment = os.environ | FAST_CHECKS | {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(16)}
    environment |= {
        "PYTHONPATH": str(REPOSITORY),
        "HF_HUB_OFFLINE": "1",
        "RAY_USAGE_STATS_ENABLED": "0",
        "OMP_NUM_THREADS": "1",
    }
    environment |= {"RAY_kill_child_processes_on_worker_exit": "0", "RAY_worker_niceness": "0"}
    environment |= forking_workers()
    environment["PYTHONPATH"] += os.pathsep + str(REPOSITORY)
    with network() as net:
        cluster = RayNodes(net, folder, num_gpus, environment)
        for _ in range(count):
            net.add()
        cluster.start(cluster.nodes[0])
        cluster.start(*cluster.nodes[1:])
        yield cluster


@dataclass(slots=True)
class NodeRun:
    """A run of train.py whose driver is on a node of the cluster."""

    process: subprocess.Popen[bytes]
    log: Path
    run_dir: Path

    def output(self) -> str:
        """Return the output so far."""
        return self.log.read_text(errors="replace")

    def wait_until(self, condition: Callable[[], bool], seconds: float = RUN_S) -> None:
        """Wait for a condition. Fail if the run ends first, or after ``seconds``."""
        deadline = Deadline("test", "a run on nodes", seconds)
        while not condition():
            assert self.process.poll() is None or condition(), self.output()[-5000:]
            if deadline.elapsed() > deadline.limit:
                self.end()
                raise deadline.exceeded(f"the run, whose output ends with: {self.output()[-5000:]}")
            time.sleep(POLL_S)

    def wait(self, seconds: float = RUN_S) -> tuple[int, str]:
        """Wait for the end of the run; return its exit code and output."""
        self.wait_until(lambda: self.process.poll() is not None, seconds)
        return self.process.wait(), self.output()

    def end(self) -> None:
        """Kill the command that entered the node; the node's processes end with the node."""
        self.process.kill()
        self.process.wait()


def start_run(cluster: RayNodes, node: NamespaceNode, run_dir: Path, *overrides: str) -> NodeRun:
    """Start train.py on ``node``; it joins the cluster."""
    address = f"placement.ray_address={cluster.address}"
    command = [sys.executable, str(REPOSITORY / "train.py"), address, f"run.dir={run_dir}", "metrics.console=plain"]
    log = cluster.folder / f"run_{next(_run_numbers)}.log"
    with log.open("wb") as out:
        process = subprocess.Popen(
            node.enter(*command, *overrides),
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=subprocess.STDOUT,
            env=cluster.environment,
            cwd=REPOSITORY,
            start_new_session=True,
        )
    return NodeRun(process, log, run_dir)


def addresses_of_engines(run_dir: Path, count: int) -> list[str]:
    """Return the address on which the newest process of each engine listens, from its log."""
    logs = [(run_dir / "logs" / f"engine_{index}.log").read_text() for index in range(count)]
    return [re.findall(r"'host': '([\d.]+)'", log)[-1] for log in logs]
