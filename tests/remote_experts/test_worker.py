"""A worker computes the same sums over both transports, in every row type, and refuses requests that do not fit."""

from __future__ import annotations

import contextlib
import socket
import threading
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from slime_like.config.schema.remote_experts import parse_address
from slime_like.errors import ConfigError, SlimeLikeError
from slime_like.util.deadline import Deadline
from slime_like_plugins.remote_experts import key, process, worker
from slime_like_plugins.remote_experts.client import IN_FLIGHT, ClientSettings, WorkerClient, WorkerRefusal
from slime_like_plugins.remote_experts.compute import expert_sums
from slime_like_plugins.remote_experts.connection import Connection, PeerLost
from slime_like_plugins.remote_experts.frames import HEADER_BYTES, FrameError, FrameKind, Header, RowType, dump_json
from slime_like_plugins.remote_experts.region import Region
from slime_like_plugins.remote_experts.serving import WorkerSettings
from slime_like_plugins.remote_experts.shapes import ExpertShapes
from tests.remote_experts.workers import (
    SHAPES,
    accept_all,
    private_key,
    reference,
    requests,
    running,
    weights_of,
    write_all,
)

BOUNDS = {RowType.float32: 2e-6, RowType.float16: 4e-3, RowType.bfloat16: 3e-2}  # relative to the largest sum
MATRICES = weights_of(SHAPES)


def commit(client: WorkerClient, version: int = 1) -> None:
    """Send all weights and commit them."""
    client.begin()
    write_all(client, MATRICES)
    assert client.unwritten() == []
    client.commit(version)


@pytest.mark.parametrize("row_type", RowType)
@pytest.mark.parametrize("transport", ["shared", "socket"])
def test_sums_are_those_of_the_maths(transport: str, row_type: RowType) -> None:
    """Submit more requests than may be in flight, and take their results in reverse order."""
    with running(ClientSettings(transport=transport, row_type=row_type)) as client:
        assert client.transport == transport
        connection = client._connection
        commit(client)
        assert (connection.bytes_sent > SHAPES.weight_bytes) == (transport == "socket")
        num_bytes = connection.bytes_sent + connection.bytes_received
        batches = [
            (layer, requests(SHAPES, layer, size, k, seed=size)) for size in (1, 7, 64) for layer, k in ((0, 2), (3, 1))
        ]
        pending = [client.submit(layer, *request) for layer, request in batches]
        assert len(pending) > IN_FLIGHT
        for (layer, request), waiting in reversed([*zip(batches, pending, strict=True)]):
            expected = reference(*request, MATRICES[layer])
            sums = client.result(waiting)
            assert sums.dtype is torch.float32
            difference = (sums.double() - expected).abs().max() / expected.abs().max()
            assert difference < BOUNDS[row_type]
        rows = sum(len(request[0]) for _, request in batches)
        pairs = sum(request[1].size for _, request in batches)
        assert (client.traffic.calls, client.traffic.rows) == (len(batches), rows)
        assert client.traffic.payload_bytes == 2 * rows * SHAPES.hidden * row_type.itemsize + 8 * pairs
        in_socket = connection.bytes_sent + connection.bytes_received - num_bytes - 2 * len(batches) * HEADER_BYTES
        assert in_socket == (client.traffic.payload_bytes if transport == "socket" else 0)


def test_both_transports_have_the_same_bits() -> None:
    results: list[torch.Tensor] = []
    for transport in ("shared", "socket"):
        with running(ClientSettings(transport=transport)) as client:
            commit(client)
            results.append(client.result(client.submit(0, *requests(SHAPES, 0, 50, 2))))
    assert torch.equal(*results)


def test_local_and_remote_experts_have_the_same_maths() -> None:
    """Pairs of id -1 add nothing."""
    rows, ids, weights = requests(SHAPES, 0, 20, 2)
    ids[::3, 0] = -1
    ids[5] = -1
    sums = expert_sums(rows, ids, weights, MATRICES[0]["w13"], MATRICES[0]["w2"])
    np.testing.assert_allclose(sums, reference(rows, ids, weights, MATRICES[0]), atol=2e-6)
    assert not sums[5].any()
    nothing = expert_sums(rows[:0], ids[:0], weights[:0], MATRICES[0]["w13"], MATRICES[0]["w2"])
    assert nothing.shape == (0, SHAPES.hidden)


@pytest.mark.parametrize("transport", ["shared", "socket"])
def test_a_number_beyond_float16_is_sent_as_float32(transport: str) -> None:
    with running(ClientSettings(transport=transport, row_type=RowType.float16)) as client:
        commit(client)
        rows, ids, weights = requests(SHAPES, 0, 4, 2)
        for scale in (torch.tensor(1e5), torch.tensor(1e3)):  # the rows exceed float16's range, then only the sums
            expected = reference(rows * scale, ids, weights, MATRICES[0])
            sums = client.result(client.submit(0, rows * scale, ids, weights)).double()
            assert expected.abs().max() > 65504
            assert (sums - expected).abs().max() / expected.abs().max() < 1e-2


def test_weights_are_served_only_when_complete() -> None:
    """A missing row is named; a request during an open update or with another version is refused."""
    with running(ClientSettings()) as client:
        request = requests(SHAPES, 0, 3, 2)
        with pytest.raises(WorkerRefusal, match="weight version 0, the worker has 0"):
            client.result(client.submit(0, *request))
        client.begin()
        write_all(client, {0: MATRICES[0]})
        client.write(3, "w13", 0, 0, MATRICES[3]["w13"][0])
        client.write(3, "w13", 1, 1, MATRICES[3]["w13"][1][1:])
        client.write(3, "w2", 0, 0, MATRICES[3]["w2"][0])
        client.write(3, "w2", 1, 0, MATRICES[3]["w2"][1])
        assert client.unwritten() == [("layer 3 w13 of remote expert 1", 16, 48 * 16)]
        with pytest.raises(WorkerRefusal, match="layer 3 w13 of remote expert 1"):
            client.commit(5)
        client.write(3, "w13", 1, 0, MATRICES[3]["w13"][1][:1])
        client.commit(5)
        client.result(client.submit(0, *request))
        client.version = 6
        with pytest.raises(WorkerRefusal, match="weight version 6, the worker has 5"):
            client.result(client.submit(0, *request))
        client.begin()
        client.version = 5
        with pytest.raises(WorkerRefusal, match="the worker has 0"):
            client.result(client.submit(0, *request))


def test_a_write_of_no_rows_is_acknowledged() -> None:
    with running(ClientSettings(transport="socket")) as client:
        json = dump_json({"name": "w13", "expert": 0, "start": 0})
        client._wait(client._submit(Header(FrameKind.WRITE, layer=0), json, [], 20.0))
        commit(client)


def test_a_report_of_all_matrices_of_a_large_model_fits_a_frame() -> None:
    shapes = ExpertShapes(tuple(range(60)), (383,) * 60, 1, 1, "float32", 8, 2)
    with running(ClientSettings(), shapes) as client:
        assert len(client.unwritten()) == 2 * sum(shapes.num_experts)


def test_a_request_that_does_not_fit_is_refused_and_the_next_one_served() -> None:
    with running(ClientSettings(transport="socket")) as client:
        commit(client)
        rows, ids, weights = requests(SHAPES, 0, 3, 2)
        for layer, arguments, message in (
            (1, (rows, ids, weights), "layer 1 has no remote experts"),
            (0, (rows, ids + 2, weights), "layer 0 has 3 remote experts"),
            (0, (rows, ids - 2, weights), "layer 0 has 3 remote experts"),
            (0, (rows[:, :8], ids, weights), "do not fit"),
            (0, requests(SHAPES, 0, 65, 2), "do not fit"),
        ):
            with pytest.raises(WorkerRefusal, match=message):
                client.result(client.submit(layer, *arguments))
        client._sequence -= 2
        with pytest.raises(WorkerRefusal, match="is stale"):
            client.result(client.submit(0, rows, ids, weights))
        client._sequence += 2
        client.result(client.submit(0, rows, ids, weights))


def test_replies_that_arrived_before_the_deadline_count_although_they_are_read_later() -> None:
    """The engine may have computed its own experts in the meantime, or its machine may have been suspended."""
    with running(ClientSettings(transport="socket")) as client:
        commit(client)
        pending = [client.submit(0, *requests(SHAPES, 0, 30, 2, seed)) for seed in range(3)]
        num_bytes, deadline = 3 * (HEADER_BYTES + 30 * SHAPES.hidden * 4), Deadline("a test", "receive replies", 20.0)
        client._connection._socket.settimeout(20)  # recv waits
        while len(client._connection._socket.recv(num_bytes, socket.MSG_PEEK)) < num_bytes:
            deadline.remaining("the worker")
        client._connection._socket.setblocking(False)
        for request in pending:
            request.deadline = replace(request.deadline, seconds=0.0)
        for request in reversed(pending):
            client.result(request)


def test_an_oversized_frame_ends_the_connection_with_its_reason() -> None:
    with running(ClientSettings(transport="socket")) as client:
        client._connection.queue(Header(FrameKind.WRITE, sequence=9, payload_bytes=1 << 40))
        with pytest.raises((FrameError, PeerLost), match="oversized WRITE"):
            client.unwritten()


def test_a_shared_region_that_is_too_small() -> None:
    """``auto`` falls back to the socket, ``shared`` raises an error with a fix, and a worker refuses small slots."""
    with running(ClientSettings(shared_bytes=1000)) as client:
        assert client.transport == "socket"
    small_client = running(ClientSettings(shared_bytes=1000, transport="shared"))
    with (
        pytest.raises(
            ConfigError, match=r"shared_bytes=1000 is too small.*raise rollout\.remote_experts\.shared_bytes"
        ),
        small_client,
    ):
        pass
    larger = replace(SHAPES, capacity=128)
    with running(ClientSettings(shared_bytes=100_000, transport="shared")) as client:
        assert client.transport == "shared"
        with pytest.raises(ConfigError, match="the shared region is too small"):
            client.settings = ClientSettings(transport="shared")
            small = Region.create(1, 64)
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(Region, "create", lambda *_: small)
                client._share(larger)


def test_memory_that_is_not_sealed_is_not_mapped(tmp_path: Path) -> None:
    region = Region.create(2, 64)
    attached = Region.attach(region.offer())
    region.slot(1, 4)[:] = b"abcd"
    assert bytes(attached.slot(1, 4)) == b"abcd" and attached.nonce == region.nonce
    for index, size in ((2, 1), (-1, 1), (0, 65)):
        with pytest.raises(FrameError, match="in slot"):
            attached.slot(index, size)
    with pytest.raises(FrameError, match="too small"):
        Region.attach(replace(region.offer(), num_slots=3))
    with (tmp_path / "file").open("w+b") as file:
        file.truncate(1000)
        with pytest.raises(FrameError, match="not sealed"):
            Region.attach(replace(region.offer(), fd=file.fileno()))
    region.close()
    with pytest.raises(FrameError, match=r"cannot be opened|not sealed"):
        Region.attach(replace(region.offer(), fd=10_000))


def listening_worker(secret: bytes) -> tuple[str, threading.Thread]:
    """Return the address of a worker that serves one connection, and its thread."""
    listener = socket.create_server(("127.0.0.1", 0))

    def accept() -> None:
        with listener:
            sock, _ = listener.accept()
            with contextlib.suppress(SlimeLikeError):
                worker.serve(sock, WorkerSettings(), secret)

    thread = threading.Thread(target=accept, daemon=True)
    thread.start()
    return f"127.0.0.1:{listener.getsockname()[1]}", thread


@pytest.mark.parametrize("same_key", [True, False])
def test_a_listening_worker_serves_only_engines_with_its_key(tmp_path: Path, same_key: bool) -> None:
    path = private_key(tmp_path)
    secret = key.read_key(path)
    address, thread = listening_worker(secret if same_key else b"another key of some length")
    origin = process.WorkerOrigin(address, path)
    if not same_key:
        with pytest.raises(PeerLost, match=f"worker 0 closed the connection; .* differs from the key in {path}"):
            process.connect(origin, "worker 0", 5)
    else:
        client = WorkerClient(process.connect(origin, "worker 0", 5), ClientSettings(name="worker 0"))
        client.open(SHAPES)
        commit(client)
        assert client.transport == "shared"  # the worker can open this process's memory
        client.close()
    thread.join(20)
    assert not thread.is_alive()


def test_an_engine_waits_for_a_worker_that_serves_another_engine_or_has_not_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The first failed attempt is logged, so that the user sees the reason for the wait."""
    monkeypatch.setenv("SLIME_LIKE_DEADLINE_FACTOR", "1")
    monkeypatch.setattr(key, "PROOF_S", 0.3)
    path = private_key(tmp_path)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        origin = process.WorkerOrigin(f"127.0.0.1:{listener.getsockname()[1]}", path)
        with pytest.raises(PeerLost, match=f"worker 0: {origin.address} accepts connections but does not answer"):
            process.connect(origin, "worker 0", 0.1)
        serving = threading.Timer(1.0, accept_all, (listener, key.read_key(path)))
        serving.start()
        process.connect(origin, "worker 0", 60).close()
        listener.shutdown(socket.SHUT_RDWR)  # ends the accept
        serving.join(20)
        assert not serving.is_alive()
    with pytest.raises(PeerLost, match=f"worker 0: cannot connect to {origin.address} .Connection refused"):
        process.connect(origin, "worker 0", 0.5)
    messages = [record.getMessage() for record in caplog.records]
    assert [message.rpartition("; ")[2] for message in messages] == ["trying again for 60 s", "trying again for 0 s"]


@pytest.mark.parametrize(("deadline_s", "limit_s"), [(30.0, 60), (300.0, 300)])
def test_the_kernel_keeps_a_connection_until_the_deadline_of_a_request(
    deadline_s: float, limit_s: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """TCP_USER_TIMEOUT also runs while a busy worker reads no further requests, so it has to cover the deadline."""
    monkeypatch.setenv("SLIME_LIKE_DEADLINE_FACTOR", "1")
    with socket.create_server(("127.0.0.1", 0)) as listener, socket.create_connection(listener.getsockname()) as sock:
        WorkerClient(Connection(sock, "worker 0", 1000), ClientSettings(deadline_s=deadline_s))
        assert sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) == 1000 * limit_s


def test_an_impostor_that_does_not_know_the_key_is_not_used(tmp_path: Path) -> None:
    path = private_key(tmp_path)
    ours, theirs = socket.socketpair()
    impostor = Connection(theirs, "the engine", 1000)
    impostor.queue(Header(FrameKind.CHALLENGE, payload_bytes=32), buffers=[bytes(32)])
    impostor.queue(Header(FrameKind.ANSWER, payload_bytes=32), buffers=[bytes(32)])
    with pytest.raises(FrameError, match="worker 0 does not know the key"):
        key.prove(Connection(ours, "worker 0", 1000), key.read_key(path), "worker 0")


@pytest.mark.parametrize(
    ("mode", "text", "message"), [(0o644, "0123456789abcdef", "chmod 600"), (0o600, "short", "has 5 characters")]
)
def test_a_key_file_that_is_not_private_or_too_short_is_refused(
    tmp_path: Path, mode: int, text: str, message: str
) -> None:
    path = tmp_path / "key"
    path.write_text(text)
    path.chmod(mode)
    with pytest.raises(ConfigError, match=message):
        key.read_key(path)
    with pytest.raises(ConfigError, match="openssl"):
        key.read_key(tmp_path / "missing")


@pytest.mark.parametrize("address", ["7100", "host:", "host:99999", ":7100", "host:port"])
def test_an_address_that_is_none_is_refused(address: str) -> None:
    with pytest.raises(ConfigError, match="HOST:PORT"):
        parse_address(address)


@pytest.mark.parametrize(
    ("address", "host"), [("7100", "127.0.0.1"), ("0.0.0.0:7100", "0.0.0.0"), ("[::1]:7100", "::1")]
)
def test_a_worker_listens_on_loopback_unless_it_gets_a_host(address: str, host: str) -> None:
    assert worker.listen_address(address) == (host, 7100)


def test_bfloat16_weights() -> None:
    shapes = ExpertShapes((1,), (2,), 16, 24, "bfloat16", 8, 2)
    matrices = weights_of(shapes)
    with running(ClientSettings(row_type=RowType.bfloat16), shapes) as client:
        write_all(client, matrices)
        client.commit(1)
        request = requests(shapes, 1, 8, 2)
        expected = reference(*request, matrices[1])
        difference = (client.result(client.submit(1, *request)).double() - expected).abs().max()
        assert difference / expected.abs().max() < 3e-2
