"""What a run left behind (processes, ports that are listened on, names in /dev/shm), and what it let others reach.

Every process of a run inherits a mark in its environment, so that those of other runs on the machine are told apart. Ray's
agents write their title over it: they are known as descendants of the others, and later by their id and start. A port is
known by its socket: another run may listen on the same number by then.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from ipaddress import IPv4Address, IPv6Address, ip_address
from pathlib import Path

from slime_like.util.deadline import Deadline
from tests.e2e.told import Secrets

MARK = "SLIME_LIKE_TEST_RUN"  # environment variable
GONE_S = 30.0  # for the processes of a run to be gone after it
SHARED = Path("/dev/shm")
LISTENING = "0A"  # state of a socket in /proc/net/tcp
ACCEPTS = 0x10000  # flag of a socket in /proc/net/unix


@dataclass(frozen=True, slots=True)
class Living:
    """A process of this machine that is no zombie."""

    pid: int
    started: str  # in ticks since boot; with ``pid`` it is the same process
    parent: int


@dataclass(slots=True)
class Held:
    """The processes of a run while it went on, and what they were seen to hold."""

    mark: str
    known: set[tuple[int, str]] = field(default_factory=set[tuple[int, str]])  # id and start of each process
    shared: set[Path] = field(default_factory=set[Path])  # names in /dev/shm, and the folders that these are in
    ports: dict[int, str] = field(default_factory=dict[int, str])  # inode of a listening socket -> address
    owners: dict[int, str] = field(default_factory=dict[int, str])  # inode of such a socket -> what has it open
    secrets: Secrets = field(default_factory=Secrets)
    paths: dict[str, bool] = field(default_factory=dict[str, bool])  # listening unix socket -> for this user alone

    def look(self, memory: bool = True) -> None:
        """Note the run's processes, their secrets and sockets, and their shared memory, which takes longest to read."""
        pids = self.processes()
        if memory:
            self.shared |= mapped(pids)
        self.secrets.look(pids)
        addresses, inodes_of = listening(), {pid: sockets([pid]) for pid in pids}
        for pid, inodes in inodes_of.items():
            for inode in inodes & addresses.keys():
                self.ports[inode], self.owners[inode] = addresses[inode], command(pid)
        paths = unix_listeners(set[int]().union(*inodes_of.values()))
        self.paths |= {path: self.paths.get(path, True) and is_private(path) for path in paths}

    def open_ports(self) -> dict[int, str]:
        """What was listened on and still is."""
        now = listening()
        return {inode: address for inode, address in self.ports.items() if inode in now}

    def processes(self) -> list[int]:
        """Those that live: with the mark, known from before, or started by one of these; but this one."""
        living = [process for process in processes() if process.pid != os.getpid()]
        mine = {p.pid for p in living if (p.pid, p.started) in self.known or is_marked(p.pid, self.mark)}
        while more := {p.pid for p in living if p.parent in mine} - mine:
            mine |= more
        self.known |= {(p.pid, p.started) for p in living if p.pid in mine}
        return sorted(mine)


def leftovers(held: Held) -> list[str]:
    """Return a line for each process of a run, and each thing that it ``held``, which is there a moment after its end."""
    deadline = Deadline("test", "leftovers", GONE_S)
    while True:
        alive = held.processes()
        # Listed last: a process that is being taken down closes its ports some time after it is no longer to be seen.
        ports = list(held.open_ports().values())
        if not (alive or ports) or deadline.elapsed() > deadline.limit:
            break
        time.sleep(0.2)
    names = [path for path in sorted(held.shared) if path.exists()]
    names += [Path(path) for path in sorted(held.paths) if os.path.exists(path)]
    return [
        *beyond_loopback(held.ports.values()),
        *sorted(held.secrets.told),
        *(f"socket {path}: open to other users" for path, private in sorted(held.paths.items()) if not private),
        *(f"process {pid}: {command(pid)}" for pid in alive),
        *(f"port {address}: somebody listens" for address in ports),
        *map(str, names),
    ]


def beyond_loopback(addresses: Iterable[str]) -> list[str]:
    """Complaints about listening sockets that another machine, or another user through its address, could reach."""
    return [f"port {address}: open beyond loopback" for address in sorted(set(addresses)) if not is_loopback(address)]


def is_loopback(address: str) -> bool:
    """``127.0.0.1:8080`` and ``::1:8080`` are; an IPv4 address may be written in IPv6."""
    ip = ip_address(address.rpartition(":")[0])
    return (getattr(ip, "ipv4_mapped", None) or ip).is_loopback


def processes() -> list[Living]:
    """Return all processes of this machine (proc_pid_stat(5))."""
    living: list[Living] = []
    for name in os.listdir("/proc"):
        if name.isdigit():
            with suppress(OSError), open(f"/proc/{name}/stat") as file:  # it has ended
                state, parent, *others = file.read().rpartition(")")[2].split()
                if state != "Z":
                    living.append(Living(int(name), others[17], int(parent)))
    return living


def is_marked(pid: int, mark: str) -> bool:
    """Whether a process has ``mark`` in its environment."""
    try:
        return f"{MARK}={mark}".encode() in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except OSError:
        return False


def command(pid: int) -> str:
    """What a process was started as; empty where there is none."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()[:120]
    except OSError:
        return ""


def mapped(pids: list[int]) -> set[Path]:
    """Names in /dev/shm that processes have mapped, and the folders that these are in."""
    paths: set[Path] = set()
    for pid in pids:
        with suppress(OSError):  # it has ended
            data = Path(f"/proc/{pid}/maps").read_bytes()
            if f" {SHARED}/".encode() in data:
                lines = data.decode(errors="replace").splitlines()
                paths |= {Path(line.split(maxsplit=5)[5]) for line in lines if f" {SHARED}/" in line}
    return {
        name
        for path in paths
        if not path.name.endswith("(deleted)")
        for name in (path, *path.parents)
        if len(name.parts) > 3
    }


def listened_on(pids: list[int]) -> dict[int, str]:
    """Listening TCP sockets that processes have open: inode and address of each."""
    everywhere, mine = listening(), sockets(pids)
    return {inode: address for inode, address in everywhere.items() if inode in mine}


def listening() -> dict[int, str]:
    """Listening TCP sockets of this machine (proc_net_tcp(5))."""
    found: dict[int, str] = {}
    for name in ("tcp", "tcp6"):
        path = Path("/proc/net") / name
        for row in path.read_text().splitlines()[1:] if path.exists() else []:
            _, local, _, state, *_, inode = row.split()[:10]
            if state == LISTENING:
                found[int(inode)] = address_of(local)
    return found


def address_of(local: str) -> str:
    """``0100007F:1F90``, words as the machine has them in memory, is ``127.0.0.1:8080``."""
    host, port = local.split(":")
    data = b"".join(bytes.fromhex(host[at : at + 8])[::-1] for at in range(0, len(host), 8))
    ip = IPv4Address(data) if len(data) == 4 else IPv6Address(data)
    return f"{ip}:{int(port, 16)}"


def unix_sockets(pids: list[int]) -> set[str]:
    """Return the names of listening unix sockets that processes have open."""
    return unix_listeners(sockets(pids))


def unix_listeners(inodes: set[int]) -> set[str]:
    """Return the names of these sockets that are listening unix sockets (unix(7)); an abstract name begins with ``@``."""
    names = set[str]()
    for row in Path("/proc/net/unix").read_text().splitlines()[1:]:
        _, _, _, flags, _, _, inode, *name = row.split(maxsplit=7)
        if name and int(flags, 16) & ACCEPTS and int(inode) in inodes:
            names.add(name[0])
    return names


def is_private(path: str) -> bool:
    """Whether a folder on the way to a socket keeps other users out; false for an abstract socket, which has none."""
    if path.startswith("@"):
        return False
    try:
        return any(not folder.stat().st_mode & 0o011 for folder in Path(path).parents)
    except OSError:  # it is gone
        return True


def sockets(pids: list[int]) -> set[int]:
    """Return the inodes of the sockets that processes have open."""
    inodes: set[int] = set()
    for pid in pids:
        folder = f"/proc/{pid}/fd"
        with suppress(OSError):  # the process has ended
            for descriptor in os.listdir(folder):  # not pathlib: a run has thousands, and they are listed each second
                with suppress(OSError):  # this file was closed
                    target = os.readlink(f"{folder}/{descriptor}")
                    if target.startswith("socket:["):
                        inodes.add(int(target[8:-1]))
    return inodes
