"""Gloo devices owned by one process group, so that its connections can be closed while an op waits.

gloo has no abort: an op waits until the timeout of its group, and ``destroy_process_group`` waits for the op. Nothing breaks
the connections to a machine that lost power, so the owner of the group closes them.
"""

# torch has no public API for gloo's options.
# pyright: reportPrivateUsage=false
from __future__ import annotations

import contextlib
import os
import re
import socket
from pathlib import Path
from typing import Any

from torch.distributed import ProcessGroupGloo

from slime_like.distributed.gloo_device import INTERFACE

FDS = Path("/proc/self/fd")
FD_INFO = Path("/proc/self/fdinfo")
TARGET = re.compile(r"^tfd:\s*(\d+) .*\bino:([0-9a-f]+)\b", re.MULTILINE)  # a descriptor watched by an epoll instance


class GlooConnections:
    """Gloo devices used by one group alone. The epoll instance of each contains the group's connections and nothing else.

    torch and gloo do not expose the connections. Remove when ``ProcessGroupGloo.abort`` ends pending ops.
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
        """Close the connections. Pending ops of this rank fail at once, and so do those of peers that wait for this rank."""
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
    """Shut down the connection of socket ``fd``. gloo owns the descriptor and closes it."""
    with socket.socket(fileno=os.dup(fd)) as connection:
        if os.fstat(connection.fileno()).st_ino == inode:  # otherwise another thread has reused the number
            connection.getpeername()  # raises for the listener
            connection.shutdown(socket.SHUT_RDWR)
