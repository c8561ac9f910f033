"""Frames between an engine and a worker: a header of 64 bytes, then optionally JSON and a payload of raw numbers.

Nothing is unpickled. Every size is checked before memory is allocated. A header that violates the protocol raises
``FrameError``; the receiver then closes the connection, because it does not know where the next frame begins.
"""

from __future__ import annotations

import json
import struct
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from enum import IntEnum
from typing import Any, NamedTuple

from slime_like.errors import SlimeLikeError

MAGIC = b"slRE"
PROTOCOL = 2
MAX_JSON = 8 << 20  # bytes; a report that names every matrix of Kimi K2 (384 experts in 60 layers) has 3 MB
INLINE = 0xFFFF  # slot of a frame whose payload follows in the socket
_FIELDS = struct.Struct("<4sHHQQiIIIHHIQ")
_CHECKSUM = struct.Struct("<I4x")
HEADER_BYTES = _FIELDS.size + _CHECKSUM.size
assert HEADER_BYTES == 64


class FrameError(SlimeLikeError, ValueError):
    """A frame that violates the protocol (oversized, damaged or of a different version), or whose contents are not valid."""


class FrameKind(IntEnum):
    """Purpose of a frame. The worker answers a request with an ACK, RESULT or ERROR that has the request's sequence number.

    An ERROR with sequence number 0 reports a violation of the protocol, after which the worker closes the connection.
    """

    HELLO = 1  # shapes of the experts
    REGION = 2  # offer of shared memory
    WRITE = 3  # rows of a matrix of one expert
    BEGIN = 4  # invalidate the weights
    CHECK = 5  # count elements that were not written
    COMMIT = 6  # serve the weights as the header's version
    COMPUTE = 7
    ACK = 8
    RESULT = 9
    ERROR = 10
    CLOSE = 11
    CHALLENGE = 12  # nonce of a listening worker
    ANSWER = 13  # proof of the key


class RowType(IntEnum):
    """Number format of rows in a payload."""

    float32 = 0
    float16 = 1
    bfloat16 = 2

    @property
    def itemsize(self) -> int:
        """Size of a number in bytes."""
        return 4 if self is RowType.float32 else 2


_KINDS, _ROW_TYPES = frozenset(FrameKind), frozenset(RowType)


class Header(NamedTuple):
    """Header of a frame; the fields are in the order of their bytes. Fields that a kind does not use keep their defaults."""

    kind: FrameKind
    sequence: int = 0
    version: int = 0  # weight version
    layer: int = 0
    num_rows: int = 0
    num_selected: int = 0  # remote experts of each row
    hidden: int = 0  # numbers of a row
    row_type: RowType = RowType.float32
    slot: int = INLINE  # slot of the shared region that has the payload
    json_bytes: int = 0
    payload_bytes: int = 0

    @property
    def inline_bytes(self) -> int:
        """Number of bytes that follow the header in the socket."""
        return self.json_bytes + (self.payload_bytes if self.slot == INLINE else 0)


@dataclass(frozen=True, slots=True)
class Frame:
    """A received frame."""

    header: Header
    json: bytes = b""
    payload: bytes | bytearray | memoryview = b""


def pack(header: Header) -> bytes:
    """Return the 64 bytes of a header."""
    fields = _FIELDS.pack(MAGIC, PROTOCOL, *header)
    return fields + _CHECKSUM.pack(zlib.crc32(fields))


def unpack(data: bytes | bytearray | memoryview, max_payload: int) -> Header:
    """Return the header in ``data``.

    Raises ``FrameError`` if it is damaged, has another protocol version or an unknown kind or row type, or announces more than
    ``MAX_JSON`` bytes of JSON or ``max_payload`` bytes of payload.
    """
    if len(data) != HEADER_BYTES:
        raise FrameError(f"a header has {len(data)} bytes instead of {HEADER_BYTES}")
    fields, checksum = data[: _FIELDS.size], _CHECKSUM.unpack(data[_FIELDS.size :])[0]
    (magic, protocol, kind, sequence, version, layer, num_rows, num_selected, hidden, *sizes) = _FIELDS.unpack(fields)
    row_type, slot, json_bytes, payload_bytes = sizes
    if magic != MAGIC:
        raise FrameError(
            f"a frame begins with {magic!r} instead of {MAGIC!r}: the peer does not use the protocol of remote experts"
        )
    if zlib.crc32(fields) != checksum:
        raise FrameError("the checksum of a header is wrong")
    if protocol != PROTOCOL:
        raise FrameError(f"the peer speaks protocol {protocol}, this process {PROTOCOL}: install the same version")
    if kind not in _KINDS or row_type not in _ROW_TYPES:
        raise FrameError(f"unknown kind {kind} or row type {row_type}")
    if json_bytes > MAX_JSON or payload_bytes > max_payload:
        raise FrameError(
            f"an oversized {FrameKind(kind).name} frame has {json_bytes} bytes of JSON and {payload_bytes} of payload; the limits are "
            f"{MAX_JSON} and {max_payload}"
        )
    numbers = sequence, version, layer, num_rows, num_selected, hidden
    return Header(FrameKind(kind), *numbers, RowType(row_type), slot, json_bytes, payload_bytes)


def dump_json(fields: Mapping[str, object]) -> bytes:
    """Return the JSON part of a frame."""
    return json.dumps(fields).encode()


def read_json(data: bytes, types: Mapping[str, type | tuple[type, ...]]) -> dict[str, Any]:
    """Return the object in ``data``, which must have exactly the keys of ``types``, with values of exactly these types.

    A tuple ``(list, item)`` requires a list of items, ``(list, list, item)`` a list of such lists. Raises ``FrameError`` on
    any other data.
    """
    try:
        fields: Any = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise FrameError(f"the JSON of a frame cannot be read: {error}") from error
    if not isinstance(fields, dict) or set(fields) != set(types):
        names = sorted(fields) if isinstance(fields, dict) else type(fields).__name__
        raise FrameError(f"the JSON of a frame has {names} instead of {sorted(types)}")
    for name, kinds in types.items():
        kinds = kinds if isinstance(kinds, tuple) else (kinds,)
        if not _has_type(fields[name], kinds):
            expected = " of ".join(kind.__name__ for kind in kinds)
            raise FrameError(
                f"the JSON of a frame has {name}={fields[name]!r:.80} instead of a value of type {expected}"
            )
    return fields


def _has_type(value: object, kinds: tuple[type, ...]) -> bool:
    if type(value) is not kinds[0]:  # not isinstance, because True is not a number here
        return False
    return len(kinds) == 1 or all(_has_type(item, kinds[1:]) for item in value)  # pyright: ignore[reportGeneralTypeIssues]
