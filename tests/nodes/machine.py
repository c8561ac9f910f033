"""Nodes on one machine: each has its own network, process ids, host name, /dev/shm and node-local folder, joined by a bridge.

A node is a first process in new namespaces, started by ``unshare``. Killing this process ends every process of the node:
the kernel ends them, and reaches no process outside of the namespace. The harness sends no other signal, and sends
this one through a pidfd that it opened when it started the node, so a reused process id cannot be hit either.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import re
import shlex
import signal
import subprocess
import time
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from slime_like.util.deadline import Deadline

COMMAND_S = 20.0  # for a command that configures a node
END_S = 30.0  # for the processes of a killed node to end
POLL_S = 0.05
LOCAL = Path("/tmp/slime_like_node")  # a different, empty folder in memory on each node
_numbers = itertools.count()


def run(*command: str, check: bool = True) -> str:
    """Run a command within ``COMMAND_S``; return its output."""
    result = subprocess.run(command, capture_output=True, text=True, timeout=COMMAND_S, check=False)
    assert result.returncode == 0 or not check, f"{shlex.join(command)}: {result.stderr.strip()}"
    return result.stdout


def missing_permission() -> str:
    """Return the reason why this process cannot create nodes; empty if it can."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    name = f"slt{os.getpid()}"
    try:
        run("ip", "netns", "add", name)
        run("ip", "netns", "exec", name, "unshare", "--pid", "--mount", "--uts", "--fork", "--mount-proc", "true")
        run("ip", "link", "add", name, "type", "bridge")
        run("ip", "link", "del", name)
    except (AssertionError, OSError, subprocess.TimeoutExpired) as error:
        return f"network namespaces are not permitted: {error}"
    finally:
        with contextlib.suppress(OSError, subprocess.TimeoutExpired):
            run("ip", "netns", "del", name, check=False)
    return ""


@dataclass(slots=True)
class Network:
    """A bridge of this machine with the prefix of the nodes' addresses. The machine itself has no address on it."""

    bridge: str
    prefix: str
    nodes: list[NamespaceNode] = field(default_factory=list["NamespaceNode"])

    def add(self) -> NamespaceNode:
        """Add a node with the next address; it has no process yet."""
        index = len(self.nodes)
        node = NamespaceNode(f"{self.bridge}n{index}", f"{self.prefix}.{index + 1}", self.bridge)
        node.create()
        self.nodes.append(node)
        return node


@contextmanager
def network() -> Generator[Network]:
    """Create a bridge, yield the network, and remove it with every node."""
    number = os.getpid() % 10_000 * 10 + next(_numbers) % 10
    net = Network(f"sl{number}", f"10.{200 + number % 50}.{number // 50 % 250}")
    run("ip", "link", "add", net.bridge, "type", "bridge")
    try:
        run("ip", "link", "set", net.bridge, "up")
        yield net
    finally:
        for node in net.nodes:
            node.remove()
        run("ip", "link", "del", net.bridge, check=False)


@dataclass(slots=True)
class NamespaceNode:
    """One node. ``start`` gives it a first process, which a kill ends together with all others."""

    name: str
    address: str
    bridge: str
    init: int = 0  # process id of its first process, on this machine
    _pidfd: int = -1  # descriptor of that process
    _parent: subprocess.Popen[bytes] | None = None

    def create(self) -> None:
        """Create the network of the node: one interface, which is on the bridge."""
        run("ip", "netns", "add", self.name)
        run("ip", "link", "add", self.name, "type", "veth", "peer", "name", "eth0", "netns", self.name)
        run("ip", "link", "set", self.name, "master", self.bridge)
        run("ip", "-n", self.name, "addr", "add", f"{self.address}/24", "dev", "eth0")
        for device in ("lo", "eth0"):
            run("ip", "-n", self.name, "link", "set", device, "up")
        self.connect()

    def start(self, command: Sequence[str], log: Path, environment: dict[str, str]) -> None:
        """Start ``command`` in new namespaces, below a shell that reaps orphans."""
        self._close()
        setup = (
            f"hostname {self.name} && mount -t tmpfs tmpfs /dev/shm && mkdir -p {LOCAL} && mount -t tmpfs tmpfs {LOCAL}"
        )
        script = f"{setup} || exit 1; {shlex.join(command)} & wait"
        unshare = ("unshare", "--pid", "--mount", "--uts", "--fork", "--kill-child=SIGKILL", "--mount-proc")
        with log.open("ab") as out:
            self._parent = subprocess.Popen(
                ["ip", "netns", "exec", self.name, *unshare, "bash", "-c", script],
                stdout=out,
                stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL,
                env=environment,
                start_new_session=True,
            )
        deadline = Deadline("test", "start of a node", COMMAND_S)
        while not (children := self._children(self._parent.pid)):
            deadline.remaining(f"{self.name}: {log.read_text()[-500:]}")
            time.sleep(POLL_S)
        self.init = children[0]
        self._pidfd = os.pidfd_open(self.init)
        own, namespace = (os.stat(f"/proc/{pid}/ns/pid").st_ino for pid in ("self", self.init))
        assert namespace != own, f"{self.name} has no process ids of its own: killing it would end other processes"

    @staticmethod
    def _children(pid: int) -> list[int]:
        with contextlib.suppress(OSError):
            return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
        return []

    def enter(self, *command: str) -> list[str]:
        """Return ``command`` as a command that runs on the node."""
        assert self.alive(), f"{self.name} has no process"
        return ["nsenter", "-t", str(self.init), "--net", "--pid", "--mount", "--uts", "--", *command]

    def alive(self) -> bool:
        """Return True while the node's first process lives."""
        return self._parent is not None and self._parent.poll() is None

    def kill(self, *, power: bool = False) -> None:
        """Kill every process of the node. With ``power``, its peers receive no packet about it, as after a power failure."""
        if power:
            self.disconnect()
        assert self._parent is not None, f"{self.name} was not started"
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(self._pidfd, signal.SIGKILL)
        self._parent.wait(timeout=END_S)

    def connect(self) -> None:
        """Plug the node's cable in."""
        run("ip", "link", "set", self.name, "up")

    def disconnect(self) -> None:
        """Unplug the node's cable."""
        run("ip", "link", "set", self.name, "down")

    @contextmanager
    def slow_link(self, rate: str, queue_bytes: int) -> Generator[None]:
        """Limit the node's link in both directions to ``rate`` (as ``20mbit``); packets beyond a short queue are lost.

        A token bucket, because not every kernel has ``netem``, which loses packets at random.
        """
        bucket = ("root", "tbf", "rate", rate, "burst", "6kb", "limit", str(queue_bytes))
        run("tc", "qdisc", "add", "dev", self.name, *bucket)
        run("ip", "netns", "exec", self.name, "tc", "qdisc", "add", "dev", "eth0", *bucket)
        try:
            yield
        finally:
            run("tc", "qdisc", "del", "dev", self.name, "root")
            run("ip", "netns", "exec", self.name, "tc", "qdisc", "del", "dev", "eth0", "root")

    def num_lost_packets(self) -> int:
        """Return the number of packets to and from the node that ``slow_link`` has lost so far."""
        outputs = (
            run("tc", "-s", "qdisc", "show", "dev", self.name),
            run("ip", "netns", "exec", self.name, "tc", "-s", "qdisc", "show", "dev", "eth0"),
        )
        return sum(int(number) for output in outputs for number in re.findall(r"dropped (\d+)", output))

    def remove(self) -> None:
        """Kill the node and remove its network."""
        if self._parent is not None and self.alive():
            self.kill()
        self._close()
        run("ip", "netns", "del", self.name, check=False)

    def _close(self) -> None:
        if self._pidfd >= 0:
            os.close(self._pidfd)
            self._pidfd = -1
