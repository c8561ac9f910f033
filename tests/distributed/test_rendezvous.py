"""Rendezvous store: has no authentication, so it listens only at its address, and groups use that address's interface."""

from __future__ import annotations

import os
from datetime import timedelta

import pytest

from slime_like.distributed.rendezvous import join_store, keep_to_interface
from slime_like.util.ports import RendezvousAddress, open_rendezvous
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


def test_an_interface_set_by_the_user_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "eth7")
    monkeypatch.delenv("NCCL_SOCKET_IFNAME", raising=False)
    keep_to_interface(HOST)
    assert os.environ["GLOO_SOCKET_IFNAME"] == "eth7"
    assert os.environ["NCCL_SOCKET_IFNAME"] == "=lo"
