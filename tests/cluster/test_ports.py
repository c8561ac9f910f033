"""Ports that are chosen now and bound seconds later are nobody else's in between."""

from __future__ import annotations

import socket
import subprocess
import sys
from pathlib import Path

import pytest
from psutil import net_if_addrs

from slime_like.cluster.workers.trainer_worker import RankWorker
from slime_like.errors import SlimeLikeError
from slime_like.util import ports
from slime_like.util.ports import PORTS, PortLease

HOST = "127.0.0.1"


def test_ports_are_kept_apart_and_given_back() -> None:
    leases = [PortLease(HOST) for _ in range(20)]
    assert len({lease.port for lease in leases}) == 20
    assert all(lease.port in PORTS for lease in leases)
    for lease in leases:
        lease.release()


@pytest.fixture
def one_port(monkeypatch: pytest.MonkeyPatch) -> int:
    """There is but one port to choose."""
    with PortLease(HOST) as port:
        pass
    monkeypatch.setattr(ports, "PORTS", range(port, port + 1))
    return port


def test_a_port_that_somebody_listens_on_is_not_taken(one_port: int) -> None:
    with socket.socket() as listener:
        listener.bind((HOST, one_port))
        listener.listen()
        with pytest.raises(SlimeLikeError, match=f"no free TCP port on {HOST} in {one_port}-{one_port}"):
            PortLease(HOST)


def test_another_process_does_not_choose_it_and_a_dead_one_holds_nothing(one_port: int) -> None:
    choose = (
        f"from slime_like.util import ports; ports.PORTS = range({one_port}, {one_port + 1}); ports.PortLease({HOST!r})"
    )
    run = [sys.executable, "-c", choose]
    assert subprocess.run(run, check=False, capture_output=True).returncode == 0
    with PortLease(HOST) as port:
        assert port == one_port
        done = subprocess.run(run, check=False, capture_output=True, text=True)
    assert "no free TCP port" in done.stderr


def test_rank_0_listens_from_the_rendezvous_on_and_nowhere_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("slime_like.cluster.workers.trainer_worker.get_node_ip_address", lambda: HOST)
    actor, critic = (RankWorker(name, 0, 1, str(tmp_path), {}) for name in ("trainer", "critic"))
    masters = [actor.rendezvous(), critic.rendezvous()]
    assert len(set(masters)) == 2, "of two roles"
    for (host, port), worker in zip(masters, (actor, critic), strict=True):
        meeting = worker.meeting((host, port))
        assert meeting.listener is not None and host == HOST
        socket.create_connection((host, port), 5).close()
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.2", port), 5)
        with pytest.raises(SlimeLikeError, match=f"cannot listen at {HOST}:{port}: "):
            ports.listen(host, port)
        meeting.listener.close()


def test_groups_keep_to_the_interface_of_the_address(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ports.INTERFACES:
        monkeypatch.delenv(name, raising=False)
    assert ports.interface_environment(HOST) == {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "=lo"}
    kinds = (socket.AF_INET, socket.AF_INET6)
    own = {name: [a.address for a in entries if a.family in kinds] for name, entries in net_if_addrs().items()}
    for name, addresses in own.items():
        assert {ports.interface_towards(address) for address in addresses} <= {name}


def test_an_address_that_no_interface_leads_to_is_refused_unless_the_user_names_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in ports.INTERFACES:
        monkeypatch.delenv(name, raising=False)
    assert ports.interface_towards("no address") == ""
    monkeypatch.setattr(ports.psutil, "net_if_addrs", dict)
    with pytest.raises(SlimeLikeError, match=f"leads to {HOST}.*set GLOO_SOCKET_IFNAME"):
        ports.interface_environment(HOST)
    for name in ports.INTERFACES:
        monkeypatch.setenv(name, "eth7")
    assert ports.interface_environment(HOST) == {}
