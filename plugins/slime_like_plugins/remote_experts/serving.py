"""Worker's side of a connection: it handles the frames of one engine's rank one at a time, and sends the replies."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from slime_like.util.deadline import Deadline
from slime_like_plugins.remote_experts.connection import Connection
from slime_like_plugins.remote_experts.frames import INLINE, Frame, FrameError, FrameKind, Header, dump_json, read_json
from slime_like_plugins.remote_experts.memory import ExpertMemory
from slime_like_plugins.remote_experts.payload import as_bytes, decode_request, decode_rows, encode_rows
from slime_like_plugins.remote_experts.region import Region, RegionOffer
from slime_like_plugins.remote_experts.shapes import reply_bytes, request_bytes, shapes_from_json

IDLE_S = 60.0  # an idle worker wakes up this often
FRAME_S = 120.0  # longest time for the rest of a frame that has begun to arrive, or for a reply to leave


@dataclass(frozen=True, slots=True)
class WorkerSettings:
    """Settings of a worker process."""

    device: str = "cpu"
    slowdown: float = 1.0  # factor on the time of a computation; only to measure slow workers


class Service:
    """Service for one engine's rank, with the state of its connection."""

    def __init__(self, connection: Connection, settings: WorkerSettings) -> None:
        self._connection, self._settings = connection, settings
        self._memory: ExpertMemory | None = None
        self._region: Region | None = None
        self._last_sequence = 0
        self._handlers: dict[FrameKind, Callable[[Frame], None]] = {
            FrameKind.HELLO: self._hello,
            FrameKind.REGION: self._attach,
            FrameKind.WRITE: self._write,
            FrameKind.BEGIN: lambda frame: self._acknowledge(frame, self._weights().begin()),
            FrameKind.CHECK: self._check,
            FrameKind.COMMIT: lambda frame: self._acknowledge(frame, self._weights().commit(frame.header.version)),
            FrameKind.COMPUTE: self._compute,
        }

    def run(self) -> None:
        """Serve until the engine sends CLOSE.

        Raises ``PeerLost`` if the engine ends first, ``FrameError`` for a frame with an invalid header or kind, and
        ``DeadlineExceeded`` if a frame or a reply takes longer than ``FRAME_S``.
        """
        try:
            while (frame := self._receive()).header.kind is not FrameKind.CLOSE:
                self._handle(frame)
            self._acknowledge(frame)
        except FrameError as error:
            self._refuse(0, error)  # sequence 0: the error ends the connection and tells the engine why
            raise
        finally:
            if self._region is not None:
                self._region.close()

    def _receive(self) -> Frame:
        deadline: Deadline | None = None
        while (frame := self._connection.next()) is None:
            self._connection.pump(IDLE_S if deadline is None else deadline.remaining("the engine"))
            if self._connection.is_inside_frame:
                deadline = deadline or Deadline("a worker of remote experts", "receive a frame", FRAME_S)
            else:
                deadline = None
        return frame

    def _handle(self, frame: Frame) -> None:
        """Answer a request. An error of the request is sent to the engine, and leaves the connection open.

        Raises ``FrameError`` if the frame's kind has no handler.
        """
        handler = self._handlers.get(frame.header.kind)
        if handler is None:
            raise FrameError(f"a worker received a frame of kind {frame.header.kind.name}")
        sequence = frame.header.sequence
        try:
            if sequence <= self._last_sequence:
                raise FrameError(f"sequence {sequence} is stale: the last request was {self._last_sequence}")
            self._last_sequence = sequence
            handler(frame)
        except (FrameError, MemoryError, RuntimeError) as error:  # RuntimeError: torch cannot allocate
            self._refuse(sequence, error)

    def _hello(self, frame: Frame) -> None:
        shapes = shapes_from_json(frame.json)
        self._memory = None
        self._memory = ExpertMemory(shapes, torch.device(self._settings.device))
        self._connection.max_payload = shapes.max_payload
        self._acknowledge(frame)

    def _attach(self, frame: Frame) -> None:
        names = ("pid", "fd", "num_slots", "slot_bytes")
        offer = RegionOffer(**read_json(frame.json, dict.fromkeys(names, int)))
        region = Region.attach(offer)
        if region.slot_bytes < self._weights().shapes.max_request:
            raise FrameError(
                f"the shared region is too small: slots of {region.slot_bytes} bytes for requests of up to "
                f"{self._weights().shapes.max_request}"
            )
        self._region = region
        self._acknowledge(frame, {"nonce": region.nonce})

    def _write(self, frame: Frame) -> None:
        fields = read_json(frame.json, {"name": str, "expert": int, "start": int})
        h, row_bytes = frame.header, self._weights().shapes.row_bytes
        rows = self._weights().rows(h.layer, fields["name"], fields["expert"], fields["start"], h.num_rows)
        if h.payload_bytes != h.num_rows * row_bytes[fields["name"]]:
            raise FrameError(
                f"a WRITE frame has {h.payload_bytes} bytes of payload instead of {h.num_rows * row_bytes[fields['name']]} for "
                f"{h.num_rows} rows of {fields['name']}"
            )
        if h.num_rows:  # frombuffer refuses an empty buffer
            data = torch.frombuffer(self._payload(frame), dtype=rows.dtype)
            rows.copy_(data.view(rows.shape))
        self._acknowledge(frame)

    def _check(self, frame: Frame) -> None:
        report = self._weights().unwritten()
        names, counts, totals = ([entry[i] for entry in report] for i in range(3))
        self._acknowledge(frame, {"names": names, "counts": counts, "totals": totals})

    def _compute(self, frame: Frame) -> None:
        h, memory = frame.header, self._weights()
        if h.version != memory.version or not h.version:
            raise FrameError(f"the engine computes with weight version {h.version}, the worker has {memory.version}")
        shapes = memory.shapes
        fits = h.hidden == shapes.hidden and h.num_rows <= shapes.capacity and h.num_selected <= shapes.max_selected
        if not fits or h.payload_bytes != request_bytes(h.num_rows, h.num_selected, h.hidden, h.row_type):
            raise FrameError(
                f"{h.num_rows} rows of {h.hidden} numbers with {h.num_selected} experts in {h.payload_bytes} bytes do not fit "
                f"{shapes}"
            )
        start = time.monotonic()
        with torch.inference_mode():
            sums = memory.sums(h.layer, *decode_request(self._payload(frame), h))
            rows, row_type = encode_rows(sums, h.row_type)
        if self._settings.slowdown > 1.0:  # a sleep of no time takes tens of microseconds
            time.sleep((self._settings.slowdown - 1.0) * (time.monotonic() - start))
        size = reply_bytes(h.num_rows, h.hidden, row_type)
        reply = Header(
            FrameKind.RESULT,
            sequence=h.sequence,
            version=h.version,
            layer=h.layer,
            num_rows=h.num_rows,
            hidden=h.hidden,
            row_type=row_type,
            slot=h.slot,
            payload_bytes=size,
        )
        if self._region is None or h.slot == INLINE:
            self._send(reply, buffers=(as_bytes(rows),))
            return
        if size:
            decode_rows(self._region.slot(h.slot, size), h.num_rows, h.hidden, row_type).copy_(rows)
        self._send(reply)

    def _payload(self, frame: Frame) -> memoryview:
        """Return a frame's payload, in the socket's buffer or in a slot.

        Raises ``FrameError`` if no memory is shared, or there is no such slot of sufficient size.
        """
        if frame.header.slot == INLINE:
            return memoryview(frame.payload)
        if self._region is None:
            raise FrameError(f"a request is in slot {frame.header.slot}, but no memory is shared")
        return self._region.slot(frame.header.slot, frame.header.payload_bytes)

    def _weights(self) -> ExpertMemory:
        if self._memory is None:
            raise FrameError("the engine has not sent the shapes of its experts")
        return self._memory

    def _acknowledge(self, frame: Frame, fields: Any = None) -> None:
        json = dump_json(fields) if fields else b""
        self._send(Header(FrameKind.ACK, sequence=frame.header.sequence, json_bytes=len(json)), json)

    def _refuse(self, sequence: int, error: Exception) -> None:
        json = dump_json({"message": str(error) or type(error).__name__})
        self._send(Header(FrameKind.ERROR, sequence=sequence, json_bytes=len(json)), json)

    def _send(self, header: Header, json: bytes = b"", buffers: tuple[memoryview, ...] = ()) -> None:
        self._connection.queue(header, json, buffers)
        deadline = Deadline("a worker of remote experts", "send a reply", FRAME_S)
        while self._connection.is_sending:
            self._connection.pump(deadline.remaining("the engine"))
