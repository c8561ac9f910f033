"""The rendezvous store of a process group. It has no authentication, so it listens on one address only."""

from __future__ import annotations

import datetime
import os
from collections.abc import Iterator
from urllib.parse import parse_qs, urlsplit

import torch.distributed as dist

from slime_like.util.ports import RendezvousAddress, interface_environment, listen

SCHEME = "slime-like-store"
"""Scheme of the URLs (``slime-like-store://host:port``) that ``init_process_group`` accepts after ``register_scheme``."""


def join_store(
    address: RendezvousAddress, world_size: int, *, is_master: bool, timeout: datetime.timedelta
) -> dist.TCPStore:
    """Return this rank's client of the store, which the master serves from a socket that listens on ``address.host``.

    torch's own master listens on every address of the machine, and any client can read and delete keys. The master takes over
    the listener of ``address``, so an address with a listener can be used only once. Raises ``SlimeLikeError`` if the master
    cannot listen. Other ranks wait up to ``timeout`` for the master, then raise torch's ``DistError``.
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


def register_scheme() -> None:
    """Make ``torch.distributed.init_process_group`` of this process accept URLs that begin with ``SCHEME``. Idempotent.

    The store of such a URL listens on one address. With ``tcp://``, torch's store would listen on every address of the machine.
    """
    if not _registered:
        dist.register_rendezvous_handler(SCHEME, _meet)
        _registered.append(SCHEME)


_registered: list[str] = []


def _meet(url: str, timeout: datetime.timedelta, **_: object) -> Iterator[tuple[dist.Store, int, int]]:
    """Yield the store, the rank and the world size. torch appends rank and world size to the URL, as a query string."""
    parts = urlsplit(url)
    query = parse_qs(parts.query)
    rank, world_size = int(query["rank"][0]), int(query["world_size"][0])
    address = RendezvousAddress(str(parts.hostname), int(parts.port or 0))
    yield join_store(address, world_size, is_master=rank == 0, timeout=timeout), rank, world_size


def keep_to_interface(host: str) -> None:
    """Make process groups created from now on listen only on the interface that reaches ``host``.

    This sets environment variables of gloo and NCCL. Variables that are already set are kept, because clusters with several
    networks choose their own interface. Raises ``SlimeLikeError`` as ``interface_environment`` does.
    """
    for name, value in interface_environment(host).items():
        os.environ.setdefault(name, value)
