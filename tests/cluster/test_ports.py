"""Port leases: a port that is chosen now and bound later stays reserved in between."""

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


def test_leased_ports_are_distinct_and_released() -> None:
    leases = [PortLease(HOST) for _ in range(20)]
    assert len({lease.port for lease in leases}) == 20
    assert all(lease.port in PORTS for lease in leases)
    for lease in leases:
        lease.release()


@pytest.fixture
def one_port(monkeypatch: pytest.MonkeyPatch) -> int:
    """Leave a single port to choose from."""
    with PortLease(HOST) as port:
        pass
    monkeypatch.setattr(ports, "PORTS", range(port, port + 1))
    return port


def test_a_port_in_use_is_not_leased(one_port: int) -> None:
    with socket.socket() as listener:
        listener.bind((HOST, one_port))
        listener.listen()
        with pytest.raises(SlimeLikeError, match=f"no free TCP port on {HOST} in {one_port}-{one_port}"):
            PortLease(HOST)


def test_ports_at_offsets_are_reserved(one_port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    lease = PortLease(HOST, (1, 3))
    for distance, is_free in enumerate((False, False, True, False, True)):
        monkeypatch.setattr(ports, "PORTS", range(one_port + distance, one_port + distance + 1))
        if is_free:
            PortLease(HOST).release()
        else:
            with pytest.raises(SlimeLikeError, match="no free TCP port"):
                PortLease(HOST)
    lease.release()
    with PortLease(HOST, (-1,)):
        pass


def test_a_lease_needs_all_of_its_ports(one_port: int) -> None:
    with socket.socket() as listener:
        listener.bind((HOST, one_port + 2))
        listener.listen()
        with pytest.raises(SlimeLikeError, match="no free TCP port"):
            PortLease(HOST, (2,))
        PortLease(HOST, (1,)).release()


def test_leases_are_exclusive_between_processes_and_end_with_them(one_port: int) -> None:
    choose = (
        f"from slime_like.util import ports; ports.PORTS = range({one_port}, {one_port + 1}); ports.PortLease({HOST!r})"
    )
    run = [sys.executable, "-c", choose]
    assert subprocess.run(run, check=False, capture_output=True).returncode == 0
    with PortLease(HOST) as port:
        assert port == one_port
        result = subprocess.run(run, check=False, capture_output=True, text=True)
    assert "no free TCP port" in result.stderr


def test_rank_0_listens_at_the_rendezvous_address_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("slime_like.cluster.workers.trainer_worker.get_node_ip_address", lambda: HOST)
    actor, critic = (RankWorker(name, 0, 1, str(tmp_path), {}) for name in ("trainer", "critic"))
    masters = [actor.rendezvous(), critic.rendezvous()]
    assert len(set(masters)) == 2, "one port per role"
    for (host, port), worker in zip(masters, (actor, critic), strict=True):
        address = worker.rendezvous_address((host, port))
        assert address.listener is not None and host == HOST
        socket.create_connection((host, port), 5).close()
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.2", port), 5)
        with pytest.raises(SlimeLikeError, match=f"cannot listen at {HOST}:{port}: "):
            ports.listen(host, port)
        address.listener.close()


def test_groups_keep_to_the_interface_of_the_address(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ports.INTERFACES:
        monkeypatch.delenv(name, raising=False)
    assert ports.interface_environment(HOST) == {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "=lo"}
    kinds = (socket.AF_INET, socket.AF_INET6)
    addresses_by_interface = {
        name: [a.address for a in entries if a.family in kinds] for name, entries in net_if_addrs().items()
    }
    for name, addresses in addresses_by_interface.items():
        interfaces = {ports.interface_towards(address) for address in addresses}
        assert interfaces <= {name} or name not in net_if_addrs(), "one of a node that another test has removed since"


def test_an_address_without_an_interface_is_refused_unless_one_is_set(
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
