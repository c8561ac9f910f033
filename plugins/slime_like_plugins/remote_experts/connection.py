"""A socket that carries frames in both directions without blocking: large requests are sent while replies arrive."""

from __future__ import annotations

import os
import select
import socket
import time
from collections import deque
from collections.abc import Sequence

from slime_like.errors import SlimeLikeError
from slime_like.util.deadline import scale
from slime_like.util.peers import end_with_lost_peer
from slime_like_plugins.remote_experts.frames import HEADER_BYTES, Frame, Header, pack, unpack

PEER_TIMEOUT_S = 60.0  # a peer on another machine that acknowledges nothing for this long is lost
BUFFER_BYTES = 4 << 20  # size of the kernel's buffer for each direction; the kernel may grant less
SPIN_S = 0.0005  # time for which a wait polls before it blocks, if the previous wait was shorter than that
type Buffer = bytes | bytearray | memoryview


class PeerLost(SlimeLikeError, ConnectionError):
    """There is no connection to the peer process: it could not be opened, has ended, or was closed."""


class Connection:
    """Frames over a connected stream socket."""

    def __init__(self, sock: socket.socket, peer: str, max_payload: int) -> None:
        """Send and receive frames over ``sock``.

        ``peer`` names the other process in errors. ``max_payload`` limits a received payload, in bytes.
        """
        sock.setblocking(False)
        for option in (socket.SO_SNDBUF, socket.SO_RCVBUF):
            sock.setsockopt(socket.SOL_SOCKET, option, BUFFER_BYTES)
        if sock.family != socket.AF_UNIX:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            end_with_lost_peer(sock, PEER_TIMEOUT_S * scale())
        self._socket, self._peer, self.max_payload = sock, peer, max_payload
        self._outgoing: deque[memoryview] = deque()
        self._incoming: deque[Frame] = deque()
        self._header: Header | None = None
        self._target = memoryview(bytearray(HEADER_BYTES))
        self._num_filled = 0
        self._poll = select.poll()
        self._poll.register(sock, select.POLLIN)
        self._polls_for_room = False
        self._spins = False
        self._end = ""  # description of the end of the connection
        self.bytes_sent = self.bytes_received = 0

    def keep_for(self, seconds: float) -> None:
        """Treat a silent peer as lost only after ``seconds`` instead of ``PEER_TIMEOUT_S``. TCP only.

        Do nothing if ``seconds`` is the shorter time.
        """
        if self._socket.family != socket.AF_UNIX and seconds > PEER_TIMEOUT_S:
            end_with_lost_peer(self._socket, seconds * scale())

    def queue(self, header: Header, json: bytes = b"", buffers: Sequence[Buffer] = ()) -> None:
        """Queue a frame, and send as much of the queue as the kernel accepts.

        The buffers are not copied, so they must not change while ``is_sending``.
        """
        for buffer in (pack(header), json, *buffers):
            if (view := memoryview(buffer)).nbytes:
                self._outgoing.append(view.cast("B"))
        self._send()

    def pump(self, timeout_s: float = 0.0) -> None:
        """Send as much as possible, and receive up to one frame.

        Wait up to ``timeout_s`` if neither is possible immediately. Raises ``PeerLost`` if the connection has ended
        and every received frame has been taken, ``FrameError`` if a received header violates the protocol.
        """
        if self._polls_for_room != bool(self._outgoing):
            self._polls_for_room = not self._polls_for_room
            self._poll.modify(self._socket, select.POLLIN | (select.POLLOUT if self._polls_for_room else 0))
        for _, events in self._wait(timeout_s):
            if events & (select.POLLIN | select.POLLHUP | select.POLLERR):
                self._receive()
            if events & select.POLLOUT:
                self._send()
        if self._end and not self._incoming:  # frames that arrived before the end may explain it
            raise PeerLost(self._end)

    def _wait(self, timeout_s: float) -> list[tuple[int, int]]:
        """Return the next events of the socket, or an empty list after ``timeout_s``.

        A blocked process resumes tens of microseconds after its peer has sent, and a decode step waits twice per layer. After a
        wait of less than ``SPIN_S``, the next one therefore polls for up to ``SPIN_S`` before it blocks; meanwhile it yields the
        core to other processes.
        """
        events = self._poll.poll(0)
        if events or timeout_s <= 0:
            return events
        start = time.monotonic()
        if self._spins:
            while not events and time.monotonic() - start < SPIN_S:
                os.sched_yield()
                events = self._poll.poll(0)
        if not events:  # this process may have been stopped meanwhile
            events = self._poll.poll(max(1, round(1000 * (timeout_s - (time.monotonic() - start)))))
        self._spins = time.monotonic() - start < SPIN_S
        return events

    def next(self) -> Frame | None:
        """Remove and return the oldest received frame; None if there is none."""
        return self._incoming.popleft() if self._incoming else None

    @property
    def is_sending(self) -> bool:
        """True while queued bytes wait to be sent."""
        return bool(self._outgoing)

    @property
    def is_inside_frame(self) -> bool:
        """True while a frame has been received only in part."""
        return self._header is not None or self._num_filled > 0

    def close(self) -> None:
        """Close the socket; bytes that were not sent are lost. Idempotent."""
        self._outgoing.clear()
        self._socket.close()

    def _send(self) -> None:
        while self._outgoing:
            try:
                num_sent = self._socket.sendmsg([*self._outgoing][:16])
            except BlockingIOError:
                return
            except OSError:
                self._outgoing.clear()  # the next receive detects the end
                return
            self.bytes_sent += num_sent
            while self._outgoing and num_sent >= len(self._outgoing[0]):
                num_sent -= len(self._outgoing.popleft())
            if num_sent:
                self._outgoing[0] = self._outgoing[0][num_sent:]

    def _receive(self) -> None:
        """Read until a frame is complete, no bytes are left, or the connection has ended.

        Bytes after a complete frame stay in the socket, where the next poll finds them.
        """
        num_frames = len(self._incoming)
        while len(self._incoming) == num_frames:
            try:
                num_received = self._socket.recv_into(self._target[self._num_filled :])
            except BlockingIOError:
                return
            except OSError as error:
                self._end = f"{self._peer} closed the connection ({error.strerror})"
                return
            if not num_received:
                part = " in the middle of a frame" if self.is_inside_frame else ""
                self._end = f"{self._peer} closed the connection{part}"
                return
            self.bytes_received += num_received
            self._num_filled += num_received
            if self._num_filled == len(self._target):
                self._advance()

    def _advance(self) -> None:
        """Handle a complete header or body."""
        if self._header is None:
            header = unpack(self._target, self.max_payload)
            if header.inline_bytes:
                self._header, self._target, self._num_filled = header, memoryview(bytearray(header.inline_bytes)), 0
                return
            frame = Frame(header)
        else:
            size = self._header.json_bytes
            frame = Frame(self._header, bytes(self._target[:size]), self._target[size:])
        self._incoming.append(frame)
        self._header, self._target, self._num_filled = None, memoryview(bytearray(HEADER_BYTES)), 0
