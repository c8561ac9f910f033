"""Client of one worker: requests in flight with their deadlines, weight updates, and the memory that both processes share."""

from __future__ import annotations

import time
from dataclasses import asdict, dataclass, field, fields

import numpy as np
import torch
from torch import Tensor

from slime_like.errors import ConfigError, DeadlineExceeded, SlimeLikeError
from slime_like.util.deadline import Deadline
from slime_like_plugins.remote_experts.compute import Ids, Weights
from slime_like_plugins.remote_experts.connection import Connection, PeerLost
from slime_like_plugins.remote_experts.flags import KEYS
from slime_like_plugins.remote_experts.frames import (
    INLINE,
    Frame,
    FrameError,
    FrameKind,
    Header,
    RowType,
    dump_json,
    read_json,
)
from slime_like_plugins.remote_experts.payload import as_bytes, decode_rows, encode_rows
from slime_like_plugins.remote_experts.region import Region, region_bytes
from slime_like_plugins.remote_experts.shapes import WRITE_BYTES, ExpertShapes, reply_bytes, request_bytes

IN_FLIGHT = 4  # maximum number of requests without a reply; number of slots of a shared region
CLOSE_S = 2.0
UPDATE_S = 120.0  # deadline of requests about weights


class WorkerRefusal(SlimeLikeError, RuntimeError):
    """An error that a worker returned for a request."""


FAILURES = (PeerLost, FrameError, DeadlineExceeded, WorkerRefusal)
"""Errors after which a worker is no longer used."""


@dataclass(frozen=True, slots=True)
class ClientSettings:
    """Settings of the connection to a worker."""

    name: str = "the worker of remote experts"  # in error messages
    transport: str = "auto"  # auto, shared or socket
    row_type: RowType = RowType.float32
    deadline_s: float = 30.0  # limit for a request
    shared_bytes: int = 0  # size of the shared region; 0: as large as requests need


@dataclass(slots=True)
class Traffic:
    """Counters of one client: its requests for sums, and replies for which no request waits."""

    calls: int = 0
    rows: int = 0
    payload_bytes: int = 0  # requests and replies
    wait_s: float = 0.0
    stale_replies: int = 0

    def plus(self, other: Traffic) -> Traffic:
        """Return the sum of both, counter by counter."""
        return Traffic(*(getattr(self, item.name) + getattr(other, item.name) for item in fields(self)))


@dataclass(slots=True, eq=False)
class ExpertRequest:
    """A request in flight, and its reply."""

    header: Header
    deadline: Deadline
    slot: int  # occupied until the reply
    reply: Frame | None = None
    rows: Tensor | None = None  # rows in a RESULT
    error: str = ""
    buffers: list[memoryview] = field(default_factory=list)  # kept until the reply, because the socket sends from them

    @property
    def is_done(self) -> bool:
        """True if the worker has replied."""
        return self.reply is not None


class WorkerClient:
    """Connection of an engine's rank to its worker. After any of ``FAILURES``, it can only be closed."""

    def __init__(self, connection: Connection, settings: ClientSettings) -> None:
        connection.keep_for(settings.deadline_s)  # a busy worker does not read
        self._connection, self.settings = connection, settings
        self._shapes: ExpertShapes | None = None
        self._region: Region | None = None
        self._free = [*range(IN_FLIGHT)]
        self._pending: dict[int, ExpertRequest] = {}
        self._sequence = 0
        self.version = 0  # version of the weights that the worker serves; 0: none
        self.traffic = Traffic()

    # ---- start -------------------------------------------------------------------------------------------------------
    def open(self, shapes: ExpertShapes, start_s: float = UPDATE_S) -> None:
        """Make the worker allocate the experts, and share memory with it if the transport allows that.

        Raises ``ConfigError`` if ``transport=shared`` is not possible, and one of ``FAILURES`` if the worker fails.
        """
        self._shapes = shapes
        self._connection.max_payload = shapes.max_payload
        self._control(FrameKind.HELLO, json=shapes.to_json(), seconds=start_s)
        if self.settings.transport != "socket":
            self._share(shapes)

    @property
    def shapes(self) -> ExpertShapes:
        """Shapes of the experts of the worker."""
        assert self._shapes is not None, "open has not been called"
        return self._shapes

    @property
    def transport(self) -> str:
        """Transport in use: shared or socket."""
        return "socket" if self._region is None else "shared"

    def _share(self, shapes: ExpertShapes) -> None:
        required_bytes = region_bytes(IN_FLIGHT, shapes.max_request)
        problem, fixes = "", f"set {KEYS}transport=socket"
        if 0 < (limit := self.settings.shared_bytes) < required_bytes:
            problem = f"{KEYS}shared_bytes={limit} is too small: {IN_FLIGHT} requests need {required_bytes} bytes"
            fixes = f"raise {KEYS}shared_bytes, lower {KEYS}capacity, or {fixes}"
        else:
            slot_bytes = (limit - region_bytes(IN_FLIGHT, 0)) // IN_FLIGHT if limit else shapes.max_request
            region = Region.create(IN_FLIGHT, slot_bytes // 64 * 64 if limit else slot_bytes)
            try:
                reply = self._control(FrameKind.REGION, json=dump_json(asdict(region.offer())))
                if read_json(reply.json, {"nonce": str})["nonce"] == region.nonce:
                    self._region = region
                    return
                problem = "the worker mapped other memory"
            except WorkerRefusal as error:
                problem = str(error)
            region.close()
        if self.settings.transport == "shared":
            raise ConfigError(f"{KEYS}transport=shared is not possible: {problem}; {fixes}")

    # ---- weights -----------------------------------------------------------------------------------------------------
    def begin(self) -> None:
        """Make the worker invalidate its weights. Raises one of ``FAILURES`` if the worker fails."""
        self.version = 0
        self._control(FrameKind.BEGIN)

    def write(self, layer: int, name: str, expert: int, start: int, rows: Tensor) -> None:
        """Send a copy of rows of a remote expert's matrix without waiting for the reply.

        If ``IN_FLIGHT`` requests are without a reply, wait for one of these replies first. If the worker fails, this or a later
        call raises one of ``FAILURES``; ``unwritten`` reports rows that the worker rejected.
        """
        size = self.shapes.row_bytes[name]
        limit = min(WRITE_BYTES, self._region.slot_bytes if self._region else WRITE_BYTES)
        step = max(1, limit // size)
        rows = rows.detach().to("cpu", self.shapes.torch_dtype).contiguous()
        for first in range(0, len(rows), step):
            part = rows[first : first + step]
            json = dump_json({"name": name, "expert": expert, "start": start + first})
            header = Header(FrameKind.WRITE, layer=layer, num_rows=len(part), payload_bytes=len(part) * size)
            in_slot = self._region is not None and header.payload_bytes <= self._region.slot_bytes
            data = as_bytes(part)
            # The queue of the socket keeps views, and the caller may overwrite the rows as soon as this function returns.
            self._submit(header, json, [data if in_slot else memoryview(bytes(data))], UPDATE_S, in_slot=in_slot)

    def unwritten(self) -> list[tuple[str, int, int]]:
        """Return (name, number of missing elements, number of elements) of each incomplete matrix.

        Raises one of ``FAILURES`` if the worker fails or its report is malformed.
        """
        report = read_json(
            self._control(FrameKind.CHECK).json or dump_json({"names": [], "counts": [], "totals": []}),
            {"names": (list, str), "counts": (list, int), "totals": (list, int)},
        )
        names, counts, totals = report["names"], report["counts"], report["totals"]
        if not len(names) == len(counts) == len(totals):
            raise FrameError(
                f"{self.settings.name} reported {len(names)} names, {len(counts)} counts and {len(totals)} totals of incomplete matrices"
            )
        return list(zip(names, counts, totals, strict=True))

    def commit(self, version: int) -> None:
        """Make the worker serve its weights as ``version``.

        Raises one of ``FAILURES``, for example ``WorkerRefusal`` if the weights are not complete.
        """
        self._control(FrameKind.COMMIT, version=version)
        self.version = version

    # ---- compute -----------------------------------------------------------------------------------------------------
    def submit(self, layer: int, rows: Tensor, ids: Ids, weights: Weights) -> ExpertRequest:
        """Send a request for the weighted sums of remote experts ``ids`` [N, K] for ``rows`` [N, H].

        If ``has_room`` is False, this call first waits for a reply to an earlier request, and raises one of ``FAILURES`` if the
        worker fails meanwhile. The arguments must not change until the reply, because the socket may send from their memory.
        """
        start = time.monotonic()
        row_type = self.settings.row_type
        if row_type is RowType.float16 or self._region is None:
            rows, row_type = encode_rows(rows, row_type)
        num_rows, hidden = rows.shape
        header = Header(
            FrameKind.COMPUTE,
            version=self.version,
            layer=layer,
            num_rows=num_rows,
            num_selected=ids.shape[1],
            hidden=hidden,
            row_type=row_type,
            payload_bytes=request_bytes(num_rows, ids.shape[1], hidden, row_type),
        )
        pairs = [memoryview(np.ascontiguousarray(ids, np.int32)), memoryview(np.ascontiguousarray(weights, np.float32))]
        if self._region is None:
            request = self._submit(header, b"", [as_bytes(rows), *pairs], self.settings.deadline_s)
        else:
            request = self._submit(header, b"", [rows, *pairs], self.settings.deadline_s, in_slot=True)
        self.traffic.calls += 1
        self.traffic.rows += num_rows
        self.traffic.payload_bytes += header.payload_bytes
        self.traffic.wait_s += time.monotonic() - start
        return request

    def poll(self) -> None:
        """Send and receive without waiting, between computations of the engine.

        Raises one of ``FAILURES`` if the worker fails.
        """
        self._pump(0.0)

    @property
    def has_room(self) -> bool:
        """True if a request would be sent without waiting for a reply."""
        return bool(self._free)

    @property
    def is_sending(self) -> bool:
        """True while bytes of a request wait for room in the socket."""
        return self._connection.is_sending

    def result(self, request: ExpertRequest) -> Tensor:
        """Return the float32 sums [N, H] of a request. Wait until the request's deadline, or longer while bytes arrive.

        Raises one of ``FAILURES``, such as ``DeadlineExceeded`` after that time, or ``WorkerRefusal`` if the worker answered with
        an error.
        """
        start = time.monotonic()
        self._wait(request)
        assert request.rows is not None
        self.traffic.wait_s += time.monotonic() - start
        return request.rows

    def close(self) -> None:
        """Ask the worker to stop serving this rank, then close the connection, whether or not the worker replies.

        Wait for the reply up to ``CLOSE_S``, or longer while bytes arrive.
        """
        try:
            self._control(FrameKind.CLOSE, seconds=CLOSE_S)
        except FAILURES:
            pass  # the worker has ended, or is stopped
        finally:
            self.drop()

    def drop(self) -> None:
        """Close the connection without telling the worker. Idempotent."""
        self._connection.close()
        self._pending.clear()
        if self._region is not None:
            self._region.close()

    # ---- requests in flight ------------------------------------------------------------------------------------------
    def _control(self, kind: FrameKind, *, json: bytes = b"", version: int = 0, seconds: float = UPDATE_S) -> Frame:
        """Send a request without payload and return its reply.

        Raises one of ``FAILURES``, for example ``WorkerRefusal`` if the reply is an error.
        """
        request = self._submit(Header(kind, version=version), json, [], seconds)
        self._wait(request)
        assert request.reply is not None
        return request.reply

    def _submit(
        self, header: Header, json: bytes, parts: list[memoryview | Tensor], seconds: float, in_slot: bool = False
    ) -> ExpertRequest:
        self._sequence += 1
        deadline = Deadline("an engine", f"{header.kind.name} request to {self.settings.name}", seconds)
        while not self._free:
            self._pump(deadline.remaining(self.settings.name))
        slot = self._free.pop()
        in_slot = in_slot and self._region is not None
        header = header._replace(sequence=self._sequence, json_bytes=len(json), slot=slot if in_slot else INLINE)
        request = ExpertRequest(header, deadline, slot)
        self._pending[self._sequence] = request
        if header.slot != INLINE:
            assert self._region is not None
            _fill(self._region.slot(slot, header.payload_bytes), header, parts)
            self._connection.queue(header, json)
        else:
            request.buffers = [part for part in parts if isinstance(part, memoryview)]
            self._connection.queue(header, json, request.buffers)
        return request

    def _wait(self, request: ExpertRequest) -> None:
        while not request.is_done:
            seconds = request.deadline.limit - request.deadline.elapsed()
            num_bytes = self._connection.bytes_received
            self._pump(max(0.0, seconds))  # a reply that arrived while this process computed or was stopped is in time
            if seconds <= 0 and not request.is_done and self._connection.bytes_received == num_bytes:
                raise request.deadline.exceeded(self.settings.name)
        if request.error:
            raise WorkerRefusal(f"{self.settings.name}: {request.error}")

    def _pump(self, timeout_s: float) -> None:
        self._connection.pump(timeout_s)
        while (frame := self._connection.next()) is not None:
            self._take(frame)

    def _take(self, frame: Frame) -> None:
        """Store a reply in its request, or only count it if that request has already had a reply.

        Raises ``FrameError`` if the reply does not fit its request, names a request that was never sent, or reports that the
        worker closes the connection.
        """
        h = frame.header
        if h.kind is FrameKind.ERROR and not h.sequence:
            raise FrameError(f"{self.settings.name} closes the connection: {_message(frame)}")
        request = self._pending.pop(h.sequence, None)
        if request is None:
            if h.sequence > self._sequence:
                raise FrameError(f"{self.settings.name} answered request {h.sequence}, which was never sent")
            self.traffic.stale_replies += 1
            return
        if h.kind is FrameKind.ERROR:
            request.error = _message(frame)
        elif h.kind is FrameKind.RESULT and request.header.kind is FrameKind.COMPUTE:
            request.rows = self._rows(frame, request.header)
        elif h.kind is not FrameKind.ACK or request.header.kind is FrameKind.COMPUTE:
            raise FrameError(f"{self.settings.name} answered {request.header.kind.name} with {h.kind.name}")
        request.reply = frame
        request.buffers.clear()
        self._free.append(request.slot)

    def _rows(self, frame: Frame, request_header: Header) -> Tensor:
        """Return the rows of a result as float32, in memory that is not reused for other replies.

        Raises ``FrameError`` if the rows do not fit the request.
        """
        h = frame.header
        expected = (
            request_header.version,
            request_header.layer,
            request_header.num_rows,
            request_header.hidden,
            request_header.slot,
        )
        if (h.version, h.layer, h.num_rows, h.hidden, h.slot) != expected:
            raise FrameError(
                f"{self.settings.name} answered request {h.sequence} with weight version {h.version}, layer {h.layer}, "
                f"{h.num_rows} rows of {h.hidden} numbers in slot {h.slot} instead of {expected}"
            )
        size = reply_bytes(h.num_rows, h.hidden, h.row_type)
        if h.payload_bytes != size:
            raise FrameError(f"{self.settings.name} announced {h.payload_bytes} bytes of rows instead of {size}")
        self.traffic.payload_bytes += size
        if h.slot == INLINE:
            return decode_rows(frame.payload, h.num_rows, h.hidden, h.row_type).float()
        assert self._region is not None
        rows = decode_rows(self._region.slot(h.slot, size), h.num_rows, h.hidden, h.row_type)
        return rows.to(torch.float32, copy=True)


def _message(frame: Frame) -> str:
    return str(read_json(frame.json, {"message": str})["message"])


def _fill(memory: memoryview, header: Header, parts: list[memoryview | Tensor]) -> None:
    """Write the parts of a payload to a slot, converting a tensor of rows to the row type of the header."""
    start = 0
    for part in parts:
        if isinstance(part, Tensor):
            size = reply_bytes(header.num_rows, header.hidden, header.row_type)
            if size:
                decode_rows(memory[:size], header.num_rows, header.hidden, header.row_type).copy_(part)
        else:
            view = part.cast("B")
            size = len(view)
            memory[start : start + size] = view
        start += size
