"""Ports and interfaces: listeners on a single address, free ports for servers that bind later."""

from __future__ import annotations

import os
import random
import socket
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from types import TracebackType

import psutil

from slime_like.errors import SlimeLikeError

BACKLOG = 2048  # ranks that connect simultaneously
INTERFACES = {"GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"}
# Above the ports of Ray's workers (10002-19999) and below Linux's ephemeral range, from which any outgoing connection
# could take a port.
PORTS = range(20_000, 32_000)


@dataclass(frozen=True, slots=True)
class RendezvousAddress:
    """Address at which the ranks of a process group meet. On rank 0 it may contain a socket that already listens there."""

    host: str
    port: int
    listener: socket.socket | None = None


def listen(host: str, port: int = 0) -> socket.socket:
    """Return a socket that listens on ``host`` and on no other address; if ``port`` is 0, the kernel chooses a free one.

    Raises ``SlimeLikeError`` if the port is taken or the address does not belong to this machine.
    """
    try:
        return socket.create_server((host, port), backlog=BACKLOG)
    except OSError as error:
        raise SlimeLikeError(f"cannot listen at {host}:{port}: {error.strerror or error}") from error


def open_rendezvous(host: str) -> RendezvousAddress:
    """Listen on a free port of ``host``, for rank 0 of a process group. The socket reserves the port.

    Raises ``SlimeLikeError`` as ``listen`` does.
    """
    listener = listen(host)
    return RendezvousAddress(host, listener.getsockname()[1], listener)


def interface_towards(host: str) -> str:
    """Return the name of the interface that routes to ``host``, ``lo`` for loopback; empty if there is none.

    For an address of this machine, return the interface that has it.
    """
    try:
        family, kind, _, _, address = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as probe:
            probe.connect(address)  # sends nothing
            local_address = probe.getsockname()[0]
    except OSError:
        return ""
    for name, addresses in psutil.net_if_addrs().items():
        if local_address in {
            entry.address.partition("%")[0] for entry in addresses
        }:  # link-local addresses end with %interface
            return name
    return ""


def interface_environment(host: str) -> Mapping[str, str]:
    """Return the environment variables that bind gloo and NCCL to the interface towards ``host``; empty if both are set already.

    Without them, gloo would listen on the address that the host name resolves to, and NCCL on the first non-loopback interface.
    Raises ``SlimeLikeError`` if no interface is known to lead to ``host``.
    """
    if os.environ.keys() >= INTERFACES:
        return {}
    if not (name := interface_towards(host)):
        raise SlimeLikeError(
            f"no network interface of this machine leads to {host}, and process groups must not listen on all of them: "
            "set GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME to the interface of the cluster (`ip address` lists them)"
        )
    return {"GLOO_SOCKET_IFNAME": name, "NCCL_SOCKET_IFNAME": f"={name}"}


class PortLease:
    """A free TCP port, and ports at ``offsets`` from it, reserved among this project's local processes until released.

    Between choosing a port and the server's bind, seconds later, another process could choose it too. An abstract unix
    socket named after the port is therefore bound until ``release``; the kernel closes it with the process. Raises
    ``SlimeLikeError`` if no port is free.
    """

    def __init__(self, host: str, offsets: Iterable[int] = ()) -> None:
        self._holders: list[socket.socket] = []
        offsets = (0, *offsets)
        for port in random.SystemRandom().sample(PORTS, len(PORTS)):
            try:
                for offset in offsets:
                    self._reserve(host, port + offset)
            except OSError:
                self.release()
                continue
            self.port = port
            return
        raise SlimeLikeError(
            f"no free TCP port on {host} in {PORTS.start}-{PORTS.stop - 1}: end processes that listen there (`ss -ltnp`)"
        )

    def _reserve(self, host: str, port: int) -> None:
        """Reserve one port. Raises ``OSError`` if it is reserved or in use."""
        holder = socket.socket(socket.AF_UNIX)
        self._holders.append(holder)
        holder.bind(f"\0slime_like-port-{port}")
        with socket.socket() as probe:
            probe.bind((host, port))

    def release(self) -> None:
        """Release the ports."""
        while self._holders:
            self._holders.pop().close()

    def __enter__(self) -> int:
        """Return the port."""
        return self.port

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()
