"""Resources that a run left behind (processes, listening ports, names in /dev/shm) or opened to other users.

Every process of a run inherits a mark in its environment, which distinguishes it from the processes of other runs. Ray's
agents overwrite their environment: they are found as descendants of marked processes, and later by process id and start time.
A port is identified by its socket's inode, because another run may listen on the same number later.
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
from tests.e2e.exposed_secrets import ExposedSecrets

MARK = "SLIME_LIKE_TEST_RUN"  # environment variable
MAX_EXIT_S = 30.0  # for the processes of a run to end after train.py has ended
SHARED_MEMORY = Path("/dev/shm")
LISTEN_STATE = "0A"  # state of a socket in /proc/net/tcp
STAT_BYTES = 4096  # more than /proc/<pid>/stat has
ROW_BYTES = 150  # bytes of a row of /proc/net/tcp
ACCEPT_FLAG = 0x10000  # flag of a socket in /proc/net/unix


@dataclass(frozen=True, slots=True)
class LiveProcess:
    """A process of this machine that is not a zombie."""

    pid: int
    start_ticks: str  # since boot
    parent: int

    @property
    def identity(self) -> tuple[int, str]:
        """Return what distinguishes the process from a later one with the same id."""
        return self.pid, self.start_ticks


@dataclass(slots=True)
class RunResources:
    """Processes of a run, with the sockets, shared memory and secrets recorded while they lived."""

    mark: str
    earlier_processes: frozenset[tuple[int, str]] = frozenset()  # id and start of processes that are older than the run
    known_processes: set[tuple[int, str]] = field(default_factory=set[tuple[int, str]])  # id and start of each process
    shared_paths: set[Path] = field(default_factory=set[Path])  # names in /dev/shm and their parent folders
    ports: dict[int, str] = field(default_factory=dict[int, str])  # inode of a listening socket -> address
    owners: dict[int, set[str]] = field(
        default_factory=dict[int, set[str]]
    )  # inode of a listening socket -> commands of the processes that had it open
    secrets: ExposedSecrets = field(default_factory=ExposedSecrets)
    paths: dict[str, bool] = field(
        default_factory=dict[str, bool]
    )  # listening unix socket -> whether only this user can connect

    def record(self, memory: bool = True) -> None:
        """Record the run's processes, secrets and sockets, and, if ``memory``, shared memory, which is the slowest to read."""
        pids = self.processes()
        if memory:
            self.shared_paths |= mapped(pids)
        self.secrets.record(pids)
        addresses, inodes_of = listening(), {pid: sockets([pid]) for pid in pids}
        for pid, inodes in inodes_of.items():
            for inode in inodes & addresses.keys():
                self.ports[inode] = addresses[inode]
                self.owners.setdefault(inode, set()).add(command(pid))
        paths = unix_listeners(set[int]().union(*inodes_of.values()))
        self.paths |= {path: self.paths.get(path, True) and is_private(path) for path in paths}

    def open_ports(self) -> dict[int, str]:
        """Return the recorded sockets that still listen."""
        inodes = listening()
        return {inode: address for inode, address in self.ports.items() if inode in inodes}

    def processes(self) -> list[int]:
        """Return the run's living processes except this one: marked, recorded before, or a descendant of such a process."""
        living = [process for process in processes() if process.pid != os.getpid()]
        run_pids = {
            p.pid
            for p in living
            if p.identity in self.known_processes
            or (p.identity not in self.earlier_processes and is_marked(p.pid, self.mark))
        }
        while children := {p.pid for p in living if p.parent in run_pids} - run_pids:
            run_pids |= children
        self.known_processes |= {p.identity for p in living if p.pid in run_pids}
        return sorted(run_pids)


def leftovers(resources: RunResources) -> list[str]:
    """Wait up to ``MAX_EXIT_S`` for the run's processes to end; return a line per process and resource that remains."""
    deadline = Deadline("test", "leftovers", MAX_EXIT_S)
    while True:
        live_pids = resources.processes()
        # Ports are listed after processes: the kernel closes the ports of a process shortly after the process has gone.
        ports = list(resources.open_ports().values())
        if not (live_pids or ports) or deadline.elapsed() > deadline.limit:
            break
        time.sleep(0.2)
    names = [path for path in sorted(resources.shared_paths) if path.exists()]
    names += [Path(path) for path in sorted(resources.paths) if os.path.exists(path)]
    return [
        *beyond_loopback(resources.ports.values()),
        *sorted(resources.secrets.exposures),
        *(f"socket {path}: open to other users" for path, private in sorted(resources.paths.items()) if not private),
        *(f"process {pid}: {command(pid)}" for pid in live_pids),
        *(f"port {address}: somebody listens" for address in ports),
        *map(str, names),
    ]


def beyond_loopback(addresses: Iterable[str]) -> list[str]:
    """Return a complaint for each listening socket that another machine could reach."""
    return [f"port {address}: open beyond loopback" for address in sorted(set(addresses)) if not is_loopback(address)]


def is_loopback(address: str) -> bool:
    """Return whether an address such as ``127.0.0.1:8080`` or ``::1:8080`` is loopback.

    IPv4 addresses mapped into IPv6 are recognised.
    """
    ip = ip_address(address.rpartition(":")[0])
    return (getattr(ip, "ipv4_mapped", None) or ip).is_loopback


def read_file(path: str) -> bytes:
    """Return the first bytes of a file of /proc, twice as fast as ``open``: a run's files are read every second."""
    file = os.open(path, os.O_RDONLY)
    try:
        return os.read(file, STAT_BYTES)
    finally:
        os.close(file)


def processes() -> list[LiveProcess]:
    """Return all processes of this machine (proc_pid_stat(5))."""
    living: list[LiveProcess] = []
    for name in os.listdir("/proc"):
        if name.isdigit():
            with suppress(OSError):  # the process has ended
                state, parent, *fields = read_file(f"/proc/{name}/stat").rpartition(b")")[2].split(maxsplit=20)
                if state != b"Z":
                    living.append(LiveProcess(int(name), fields[17].decode(), int(parent)))
    return living


def living_processes() -> frozenset[tuple[int, str]]:
    """Return the identities of all processes of this machine."""
    return frozenset(process.identity for process in processes())


def is_marked(pid: int, mark: str) -> bool:
    """Return whether a process has ``mark`` in its environment."""
    try:
        return f"\0{MARK}={mark}\0".encode() in b"\0%b\0" % Path(f"/proc/{pid}/environ").read_bytes()
    except OSError:
        return False


def command(pid: int) -> str:
    """Return the command line of a process, cut to 120 characters; empty if the process has ended."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()[:120]
    except OSError:
        return ""


def mapped(pids: list[int]) -> set[Path]:
    """Return the names in /dev/shm that processes have mapped, and their parent folders."""
    paths: set[Path] = set()
    for pid in pids:
        with suppress(OSError):  # the process has ended
            data = Path(f"/proc/{pid}/maps").read_bytes()
            if f" {SHARED_MEMORY}/".encode() in data:
                lines = data.decode(errors="replace").splitlines()
                paths |= {Path(line.split(maxsplit=5)[5]) for line in lines if f" {SHARED_MEMORY}/" in line}
    return {
        name
        for path in paths
        if not path.name.endswith("(deleted)")
        for name in (path, *path.parents)
        if len(name.parts) > 3
    }


def listened_on(pids: list[int]) -> dict[int, str]:
    """Return the listening TCP sockets that processes have open, as {inode: address}."""
    addresses, inodes = listening(), sockets(pids)
    return {number: address for number, address in addresses.items() if number in inodes}


def listening() -> dict[int, str]:
    """Return the listening TCP sockets of this machine (proc_net_tcp(5)), as {inode: address}.

    The kernel lists them before all connections. Reading stops at the first connection, because the kernel would search
    a table of megabytes for the rest.
    """
    addresses: dict[int, str] = {}
    for name in ("tcp", "tcp6"):
        path = Path("/proc/net") / name
        if not path.exists():
            continue
        with path.open("rb", buffering=ROW_BYTES) as file:
            next(file)  # the header
            for row in file:
                _, local, _, state, *_, inode = row.decode().split()[:10]
                if state != LISTEN_STATE:
                    break
                addresses[int(inode)] = address_of(local)
    return addresses


def address_of(local: str) -> str:
    """Return ``127.0.0.1:8080`` for ``0100007F:1F90``, whose words are in the byte order of the machine."""
    host, port = local.split(":")
    data = b"".join(bytes.fromhex(host[start : start + 8])[::-1] for start in range(0, len(host), 8))
    ip = IPv4Address(data) if len(data) == 4 else IPv6Address(data)
    return f"{ip}:{int(port, 16)}"


def unix_sockets(pids: list[int]) -> set[str]:
    """Return the names of listening unix sockets that processes have open."""
    return unix_listeners(sockets(pids))


def unix_listeners(inodes: set[int]) -> set[str]:
    """Return the names of the listening unix sockets among ``inodes`` (unix(7)); an abstract name begins with ``@``."""
    names = set[str]()
    for row in Path("/proc/net/unix").read_text().splitlines()[1:]:
        _, _, _, flags, _, _, inode, *name = row.split(maxsplit=7)
        if name and int(flags, 16) & ACCEPT_FLAG and int(inode) in inodes:
            names.add(name[0])
    return names


def is_private(path: str) -> bool:
    """Return whether a parent folder of a socket excludes other users; False for an abstract socket, which has no folder."""
    if path.startswith("@"):
        return False
    try:
        return any(not folder.stat().st_mode & 0o011 for folder in Path(path).parents)
    except OSError:  # the socket's folder was removed
        return True


def sockets(pids: list[int]) -> set[int]:
    """Return the inodes of the sockets that processes have open."""
    inodes: set[int] = set()
    for pid in pids:
        folder = f"/proc/{pid}/fd"
        with suppress(OSError):  # the process has ended
            # os.listdir is faster than pathlib: the thousands of descriptors of a run are listed every second.
            for descriptor in os.listdir(folder):
                with suppress(OSError):  # this file was closed
                    target = os.readlink(f"{folder}/{descriptor}")
                    if target.startswith("socket:["):
                        inodes.add(int(target[8:-1]))
    return inodes
