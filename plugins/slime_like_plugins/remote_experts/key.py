"""Mutual authentication with a shared key: each end of a connection signs the other's random number."""

from __future__ import annotations

import hashlib
import hmac
import os
import secrets
import stat
from pathlib import Path

from slime_like.config.schema.remote_experts import MIN_KEY_LENGTH
from slime_like.errors import ConfigError
from slime_like.util.deadline import Deadline
from slime_like_plugins.remote_experts.connection import Connection
from slime_like_plugins.remote_experts.frames import Frame, FrameError, FrameKind, Header

NONCE_BYTES = 32
MAX_PAYLOAD = 256  # bytes that an unknown peer may send
PROOF_S = 10.0


def read_key(path: Path) -> bytes:
    """Return the key in a file.

    Raises ``ConfigError`` if the file cannot be read, belongs to another user, gives group or others any permission, or has a
    short key.
    """
    try:
        state, text = path.stat(), path.read_bytes().strip()
    except OSError as error:
        raise ConfigError(f"key file {path}: {error.strerror}: create it with e.g. `openssl rand -hex 32`") from error
    if state.st_mode & (stat.S_IRWXG | stat.S_IRWXO) or state.st_uid != os.getuid():
        raise ConfigError(f"key file {path} can be read by other users: run `chmod 600 {path}` as its owner")
    if len(text) < MIN_KEY_LENGTH:
        raise ConfigError(
            f"key file {path} has {len(text)} characters: use at least {MIN_KEY_LENGTH}, e.g. `openssl rand -hex 32`"
        )
    return text


def admit(connection: Connection, secret: bytes) -> None:
    """Challenge an engine, and answer its challenge.

    Raises ``FrameError`` if the engine does not know the key or violates the protocol, ``PeerLost`` if it closes the connection,
    and ``DeadlineExceeded`` if it does not answer within ``PROOF_S``.
    """
    nonce = secrets.token_bytes(NONCE_BYTES)
    _send(connection, FrameKind.CHALLENGE, nonce)
    payload = bytes(_receive(connection, FrameKind.ANSWER, "the engine").payload)
    proof, engine_nonce = payload[:NONCE_BYTES], payload[NONCE_BYTES:]
    if len(engine_nonce) != NONCE_BYTES or not hmac.compare_digest(proof, _sign(secret, b"engine", nonce)):
        raise FrameError("an engine does not know the key of this worker")
    _send(connection, FrameKind.ANSWER, _sign(secret, b"worker", engine_nonce))


def prove(connection: Connection, secret: bytes, worker: str) -> None:
    """Answer a worker's challenge, and challenge the worker in turn.

    Raises ``FrameError`` if the worker does not know the key or violates the protocol, ``PeerLost`` if it closes the connection,
    and ``DeadlineExceeded`` if its challenge or its answer takes longer than ``PROOF_S``.
    """
    challenge = bytes(_receive(connection, FrameKind.CHALLENGE, worker).payload)
    nonce = secrets.token_bytes(NONCE_BYTES)
    _send(connection, FrameKind.ANSWER, _sign(secret, b"engine", challenge) + nonce)
    answer = bytes(_receive(connection, FrameKind.ANSWER, worker).payload)
    if not hmac.compare_digest(answer, _sign(secret, b"worker", nonce)):
        raise FrameError(f"{worker} does not know the key of this engine")


def _sign(secret: bytes, role: bytes, nonce: bytes) -> bytes:
    return hmac.digest(secret, role + nonce, hashlib.sha256)


def _send(connection: Connection, kind: FrameKind, payload: bytes) -> None:
    connection.queue(Header(kind, payload_bytes=len(payload)), buffers=(payload,))


def _receive(connection: Connection, kind: FrameKind, peer: str) -> Frame:
    deadline = Deadline("remote experts", "prove the key", PROOF_S)
    while (frame := connection.next()) is None:
        connection.pump(deadline.remaining(peer))
    if frame.header.kind is not kind:
        raise FrameError(f"{peer} sent {frame.header.kind.name} instead of {kind.name}")
    return frame
