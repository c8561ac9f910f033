"""Gloo devices: one shared by a process's groups, and separate ones for groups whose connections can be closed."""

# torch has no public API for its registry of backends or for gloo's options.
# pyright: reportPrivateUsage=false
from __future__ import annotations

import contextlib
import os
import re
import socket
from pathlib import Path
from typing import Any

from torch.distributed import ProcessGroupGloo
from torch.distributed import distributed_c10d as c10d

INTERFACE = "GLOO_SOCKET_IFNAME"  # read by torch when it creates a device

_devices: dict[str, list[Any]] = {}  # by network interface


def share_gloo_device() -> None:
    """Make the gloo groups that this process creates from now on share devices, one per network interface. Idempotent.

    Groups whose options contain devices keep these. Call this before ``install.install``: with ``guard.release``, that replaces
    torch's function that creates gloo groups, and this function then does nothing.

    torch creates a device per group. Each device's thread wakes up 100 times per second even if nothing is communicated,
    and a rank has 20 groups. Remove when torch shares devices, or when gloo waits for events without a timeout.
    """
    c10d.Backend._ensure_backend_registered("gloo")
    plugins: Any = c10d.Backend._plugins
    plugin = plugins["GLOO"]
    if plugin.creator_fn is c10d._create_gloo_process_group:
        plugins["GLOO"] = plugin._replace(creator_fn=create_on_shared_device)


def create_on_shared_device(request: Any, options: Any) -> Any:
    """Return a gloo backend on the devices that ``options`` contains; if it contains none, on the process's shared devices.

    Each value of ``GLOO_SOCKET_IFNAME`` has its own shared devices, created at their first use.
    """
    interface = os.environ.get(INTERFACE, "")
    own_devices: list[Any] | None = getattr(options, "_devices", None)
    if not own_devices and interface not in _devices:
        backend: Any = c10d._create_gloo_process_group(request, options)
        _devices[interface] = backend.options._devices
        return backend
    gloo: Any = ProcessGroupGloo
    shared = gloo._Options()
    shared._devices = own_devices or _devices[interface]
    shared._threads = 2 * len(shared._devices)  # as torch sets it
    shared._timeout = request.timeout
    shared.enable_reconfigure = request.enable_reconfigure
    shared.global_ranks_in_group, shared.group_name = request.global_ranks_in_group, request.group_id
    return gloo(request.store, request.group_rank, request.group_size, shared)


FDS = Path("/proc/self/fd")
FD_INFO = Path("/proc/self/fdinfo")
TARGET = re.compile(r"^tfd:\s*(\d+) .*\bino:([0-9a-f]+)\b", re.MULTILINE)  # a descriptor watched by an epoll instance


class GlooConnections:
    """Gloo devices used by one group alone, so that its connections can be closed while an op waits.

    gloo has no abort: an op waits until the timeout of its group, and ``destroy_process_group`` waits for the op. Nothing
    breaks the connections to a machine that lost power, so the owner of the group closes them. torch and gloo do not expose
    the connections, but the epoll instance of each device contains the group's connections and nothing else. The constructor
    assumes that every epoll instance created while it runs belongs to its devices, so no other thread may create one meanwhile.
    Remove when ``ProcessGroupGloo.abort`` ends pending ops.
    """

    def __init__(self) -> None:
        before = _epoll_instances()
        gloo: Any = ProcessGroupGloo
        interfaces = [name for name in os.environ.get(INTERFACE, "").split(",") if name]
        self.options: Any = gloo._Options()  # for the creation of the group
        self.options._devices = [gloo.create_device(interface=name) for name in interfaces] or [
            gloo.create_default_device()
        ]
        self._epolls = _epoll_instances() - before

    def close(self) -> None:
        """Close the connections. Pending ops of this rank, and of peers that wait for it, fail immediately."""
        for epoll in self._epolls & _epoll_instances():
            for fd, inode in TARGET.findall((FD_INFO / str(epoll)).read_text()):
                with contextlib.suppress(OSError):  # gloo has closed it in the meantime, or it is the listener
                    _shut_down(int(fd), int(inode, 16))


def _epoll_instances() -> set[int]:
    """Return the descriptors of this process that are epoll instances."""
    instances: set[int] = set()
    for path in FDS.iterdir():
        with contextlib.suppress(OSError):
            if path.readlink().name == "anon_inode:[eventpoll]":
                instances.add(int(path.name))
    return instances


def _shut_down(fd: int, inode: int) -> None:
    """Shut down the connection of socket ``fd`` if its inode is ``inode``. gloo owns the descriptor and closes it.

    Raises ``OSError`` if the descriptor is closed, is not a socket, or is a socket without a connection, such as the listener.
    """
    copy = os.dup(fd)
    try:
        connection = socket.socket(fileno=copy)
    except OSError:
        # Another thread has reused the number for something else, and the constructor does not close the copy.
        os.close(copy)
        raise
    with connection:
        if os.fstat(connection.fileno()).st_ino == inode:  # otherwise another thread has reused the number
            connection.getpeername()  # raises for the listener
            connection.shutdown(socket.SHUT_RDWR)
