"""Frames are received as they were sent, and a damaged frame is refused before memory is allocated."""

from __future__ import annotations

import socket
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slime_like_plugins.remote_experts import connection as connection_module
from slime_like_plugins.remote_experts import serving
from slime_like_plugins.remote_experts.connection import Connection, PeerLost
from slime_like_plugins.remote_experts.frames import (
    HEADER_BYTES,
    INLINE,
    MAX_JSON,
    Frame,
    FrameError,
    FrameKind,
    Header,
    RowType,
    dump_json,
    pack,
    read_json,
    unpack,
)
from slime_like_plugins.remote_experts.shapes import shapes_from_json
from slime_like_plugins.remote_experts.worker import serve
from tests.remote_experts.workers import SHAPES, in_thread

LIMIT = 1000
HEADER = Header(FrameKind.COMPUTE, 7, 3, 2, 5, 2, 16, RowType.bfloat16, INLINE, 0, 200)


@given(
    st.builds(
        Header,
        st.sampled_from(FrameKind),
        *(st.integers(0, 2**64 - 1),) * 2,
        st.integers(-(2**31), 2**31 - 1),
        *(st.integers(0, 2**32 - 1),) * 3,
        st.sampled_from(RowType),
        st.integers(0, INLINE),
        st.integers(0, MAX_JSON),
        st.integers(0, LIMIT),
    )
)
def test_a_header_is_unpacked_as_it_was_packed(header: Header) -> None:
    data = pack(header)
    assert len(data) == HEADER_BYTES and unpack(data, LIMIT) == header


@given(st.integers(0, 59), st.integers(1, 255))
def test_any_changed_byte_of_a_header_is_refused(position: int, change: int) -> None:
    data = bytearray(pack(HEADER))
    data[position] ^= change
    with pytest.raises(FrameError, match=r"checksum|begins with"):
        unpack(data, LIMIT)


@pytest.mark.parametrize("field", ["payload_bytes", "json_bytes"])
def test_an_oversized_frame_is_refused(field: str) -> None:
    sizes: dict[str, Any] = {field: max(LIMIT, MAX_JSON) + 1}
    with pytest.raises(FrameError, match="oversized COMPUTE"):
        unpack(pack(HEADER._replace(**sizes)), LIMIT)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (b"{", "cannot be read"),
        (b"[" * 10_000, "cannot be read"),
        (b"\xff\xfe\xff", "cannot be read"),
        (b"[]", "has list instead of"),
        (b'{"count": 1}', "instead of"),
        (b'{"count": 1, "names": [], "extra": 1}', "instead of"),
        (b'{"count": true, "names": []}', "count=True"),
        (b'{"count": 1.0, "names": []}', "count=1.0"),
        (b'{"count": "1", "names": []}', "count='1'"),
        (b'{"count": 1, "names": "ab"}', "names='ab'"),
        (b'{"count": 1, "names": ["a", 1]}', "names="),
    ],
)
def test_json_of_other_types_is_refused(text: bytes, message: str) -> None:
    with pytest.raises(FrameError, match=message):
        read_json(text, {"count": int, "names": (list, str)})
    assert read_json(b'{"count": 1, "names": ["a"]}', {"count": int, "names": (list, str)})["names"] == ["a"]


@pytest.mark.parametrize(
    "change",
    [
        {"hidden": 0},
        {"hidden": 10**30},
        {"num_experts": [3, 2**40]},
        {"layers": [0, 0]},
        {"layers": [0]},
        {"dtype": "int8"},
        {"capacity": 5000},
        {"num_experts": [3, -1]},
    ],
)
def test_shapes_that_do_not_fit_are_refused(change: dict[str, Any]) -> None:
    fields = read_json(
        SHAPES.to_json(),
        dict.fromkeys(("hidden", "intermediate", "capacity", "max_selected"), int)
        | {"layers": (list, int), "num_experts": (list, int), "dtype": str},
    )
    assert shapes_from_json(dump_json(fields)) == SHAPES
    with pytest.raises(FrameError):
        shapes_from_json(dump_json(fields | change))


def connections() -> tuple[Connection, socket.socket]:
    """Return a connection with a payload limit, and the peer's socket."""
    ours, theirs = socket.socketpair()
    return Connection(ours, "the peer", LIMIT), theirs


def test_frames_arrive_whole_from_single_bytes() -> None:
    connection, peer = connections()
    json = dump_json({"count": 1})
    header = HEADER._replace(json_bytes=len(json))
    for byte in pack(header) + json + bytes(range(200)) + pack(Header(FrameKind.CLOSE)):
        peer.send(bytes([byte]))
        connection.pump()
    frame, end = connection.next(), connection.next()
    assert frame is not None and end is not None and connection.next() is None
    assert (frame.header, frame.json, bytes(frame.payload)) == (header, json, bytes(range(200)))
    assert end.header.kind is FrameKind.CLOSE and not connection.is_inside_frame


@pytest.mark.parametrize("size", [1, HEADER_BYTES, HEADER_BYTES + 199])
def test_a_truncated_frame_is_an_error(size: int) -> None:
    connection, peer = connections()
    peer.send((pack(HEADER) + bytes(200))[:size])
    connection.pump()
    assert connection.is_inside_frame
    peer.close()
    with pytest.raises(PeerLost, match="the peer closed the connection in the middle of a frame"):
        connection.pump(1)


def test_both_ends_send_more_than_the_kernel_holds() -> None:
    """Neither end waits for the other to read first."""
    ours, theirs = socket.socketpair()
    size = 32 << 20
    ends = [Connection(sock, "the peer", size) for sock in (ours, theirs)]
    for end in ends:
        end.queue(Header(FrameKind.WRITE, payload_bytes=size), buffers=[bytes(size)])
    frames: list[Frame | None] = [None, None]
    for _ in range(100_000):
        for index, end in enumerate(ends):
            end.pump()
            frames[index] = frames[index] or end.next()
        if all(frames):
            break
    assert all(frame is not None and len(frame.payload) == size for frame in frames)


@pytest.mark.parametrize("size", [1, HEADER_BYTES + 3])
def test_a_worker_does_not_wait_forever_for_the_rest_of_a_frame(size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """An engine that was stopped within a frame keeps its connection, but the worker ends it after a deadline."""
    monkeypatch.setattr(serving, "FRAME_S", 0.2)
    with in_thread(lambda sock: serve(sock, serving.WorkerSettings())) as sock:
        sock.send((pack(HEADER._replace(kind=FrameKind.HELLO, json_bytes=9, payload_bytes=0)) + b"{}       ")[:size])
        sock.settimeout(20)
        assert sock.recv(1) == b""


class SimulatedWait:
    """Fake clock and poll of a connection. Yields and waits advance the clock; the first yield lets the peer send."""

    def __init__(self, connection: Connection, peer: socket.socket) -> None:
        self.now, self.num_yields, self.waits_ms = 0.0, 0, list[int]()
        self._events, self._peer = connection._poll, peer

    def monotonic(self) -> float:
        """Return the time."""
        return self.now

    def sched_yield(self) -> None:
        """Advance the clock by a millisecond; the first time, let the peer send a frame."""
        if not self.num_yields:
            self._peer.send(pack(Header(FrameKind.CLOSE)))
        self.now, self.num_yields = self.now + 0.001, self.num_yields + 1

    def poll(self, milliseconds: int) -> list[tuple[int, int]]:
        """Advance the clock by the timeout, and return the events of the socket."""
        if milliseconds:
            self.now += milliseconds / 1000
            self.waits_ms.append(milliseconds)
        return self._events.poll(0)


def test_a_wait_polls_first_if_the_wait_before_it_was_short(monkeypatch: pytest.MonkeyPatch) -> None:
    """A long wait is followed by one that blocks at once, so that an idle peer takes no CPU time."""
    connection, peer = connections()
    wait = SimulatedWait(connection, peer)
    monkeypatch.setattr(connection, "_poll", wait)
    for name in ("time", "os"):
        monkeypatch.setattr(connection_module, name, wait)
    monkeypatch.setattr(connection_module, "SPIN_S", 0.0045)
    connection.pump(0.004)  # blocks; shorter than SPIN_S
    assert (wait.num_yields, wait.waits_ms) == (0, [4])
    connection.pump(20.0)  # the frame arrives
    assert (wait.num_yields, wait.waits_ms) == (1, [4]) and connection.next() == Frame(Header(FrameKind.CLOSE))
    connection.pump(0.05)  # polls, then blocks; longer than SPIN_S
    assert (wait.num_yields, wait.waits_ms) == (6, [4, 45])
    connection.pump(0.05)
    assert (wait.num_yields, wait.waits_ms) == (6, [4, 45, 50])
