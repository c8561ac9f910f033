"""Rendezvous store: without authentication, it listens only at its address, and groups use this address's interface."""

from __future__ import annotations

import os
from datetime import timedelta

import pytest
from torch.distributed.rendezvous import rendezvous

from slime_like.distributed.rendezvous import SCHEME, join_store, keep_to_interface, register_scheme
from slime_like.rollout.engine.node import RENDEZVOUS_SCHEME
from slime_like.util.ports import PortLease, RendezvousAddress, open_rendezvous
from tests.e2e.leftovers import listened_on

HOST = "127.0.0.1"
TIMEOUT = timedelta(seconds=20)


@pytest.mark.parametrize("with_listener", [True, False])
def test_the_store_listens_at_its_address_only(with_listener: bool) -> None:
    sockets_before = listened_on([os.getpid()])
    rendezvous = open_rendezvous(HOST)
    if not with_listener and rendezvous.listener is not None:
        rendezvous.listener.close()
        rendezvous = RendezvousAddress(HOST, rendezvous.port)
    master = join_store(rendezvous, 2, is_master=True, timeout=TIMEOUT)
    guest = join_store(RendezvousAddress(HOST, rendezvous.port), 2, is_master=False, timeout=TIMEOUT)
    guest.set("key", "value")
    assert master.get("key") == b"value"
    new_sockets = {
        inode: address for inode, address in listened_on([os.getpid()]).items() if inode not in sockets_before
    }
    assert list(new_sockets.values()) == [f"{HOST}:{rendezvous.port}"]
    del master, guest
    assert not listened_on([os.getpid()]).keys() - sockets_before.keys(), "the socket is closed with the store"


def test_ranks_that_meet_by_url_listen_at_its_address_only() -> None:
    """SGLang passes a URL to ``init_process_group``. For ``tcp://``, torch's store listens at all addresses."""
    register_scheme()
    register_scheme()
    sockets_before = listened_on([os.getpid()])
    with PortLease(HOST) as port:
        url = f"{RENDEZVOUS_SCHEME}://{HOST}:{port}"
        (store, *first), (other_store, *second) = (next(rendezvous(url, rank, 2, timeout=TIMEOUT)) for rank in range(2))
    assert (first, second, SCHEME) == ([0, 2], [1, 2], RENDEZVOUS_SCHEME)
    other_store.set("key", "value")
    assert store.get("key") == b"value"
    new_sockets = listened_on([os.getpid()])
    assert [new_sockets[inode] for inode in new_sockets.keys() - sockets_before.keys()] == [f"{HOST}:{port}"]


def test_an_interface_set_by_the_user_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "eth7")
    monkeypatch.delenv("NCCL_SOCKET_IFNAME", raising=False)
    keep_to_interface(HOST)
    assert os.environ["GLOO_SOCKET_IFNAME"] == "eth7"
    assert os.environ["NCCL_SOCKET_IFNAME"] == "=lo"
