"""The rendezvous store of a process group. It has no authentication, so it listens at one address only."""

from __future__ import annotations

import datetime
import os

import torch.distributed as dist

from slime_like.util.ports import RendezvousAddress, interface_environment, listen


def join_store(
    address: RendezvousAddress, world_size: int, *, is_master: bool, timeout: datetime.timedelta
) -> dist.TCPStore:
    """Return this rank's client of the store, which the master serves from a socket that listens at ``address.host``.

    torch's own master listens at every address of the machine, and any client can read and delete keys.
    """
    fd = None
    if is_master:
        listener = address.listener or listen(address.host, address.port)
        fd = listener.detach()  # the store closes it
    return dist.TCPStore(
        address.host,
        address.port,
        world_size,
        is_master,
        timeout,
        wait_for_workers=False,
        master_listen_fd=fd,
    )


def keep_to_interface(host: str) -> None:
    """Make process groups created from now on listen only at the interface that reaches ``host``.

    Variables that are already set are kept: clusters with several networks choose their own.
    """
    for name, value in interface_environment(host).items():
        os.environ.setdefault(name, value)
