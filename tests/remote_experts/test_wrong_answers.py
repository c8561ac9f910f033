"""Workers, in threads, that answer wrongly: the policy ends or replaces them in time, and no sum is wrong."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from slime_like.errors import SlimeLikeError
from slime_like_plugins.remote_experts.connection import Connection, PeerLost
from slime_like_plugins.remote_experts.experts import RemoteExpertsLost
from slime_like_plugins.remote_experts.frames import Frame, FrameKind, Header, pack
from slime_like_plugins.remote_experts.memory import ExpertMemory
from slime_like_plugins.remote_experts.serving import Service, WorkerSettings
from tests.remote_experts.forked_layer import DEADLINE_S, OPTIONS, assert_sums, experts_of, update

LATE_S = 5.0


class ThreadProcess:
    """Worker in a thread, which answers wrongly."""

    pid = 1

    def __init__(self, origin: object) -> None:
        self.socket, theirs = socket.socketpair()
        connection = Connection(theirs, "the engine", 32 << 20)
        service = FaultyService(connection, WorkerSettings())
        service.wrong_answers, FaultyService.remaining = FaultyService.remaining, 0

        def run() -> None:
            with contextlib.suppress(SlimeLikeError, OSError):
                service.run()
            connection.close()

        threading.Thread(target=run, daemon=True).start()

    def stop(self) -> None:
        """End the connection."""
        self.socket.close()

    kill = stop


class FaultyService(Service):
    """Worker that answers its first ``wrong_answers`` computations by ``fault``."""

    fault: Callable[[FaultyService, Frame], None]
    remaining = 1  # wrong answers of the next worker; a worker that was abandoned may still answer
    wrong_answers = 0

    def _compute(self, frame: Frame) -> None:
        if self.wrong_answers:
            self.wrong_answers -= 1
            type(self).fault(self, frame)
        else:
            super()._compute(frame)

    def send_raw(self, data: bytes) -> None:
        """Send bytes that are not a frame."""
        self._connection._outgoing.append(memoryview(data))
        self._connection.pump()


def result(frame: Frame, **changes: Any) -> Header:
    """Return the header of a right answer with changes."""
    h = frame.header
    size = h.num_rows * h.hidden * 4
    answer = Header(
        FrameKind.RESULT, h.sequence, h.version, h.layer, h.num_rows, 0, h.hidden, h.row_type, h.slot, 0, size
    )
    return answer._replace(**changes)


def answer(service: FaultyService, frame: Frame, **changes: Any) -> None:
    """Send an answer of zeros."""
    header = result(frame, **changes)
    service._send(header, buffers=(memoryview(bytes(header.inline_bytes)),))


def stale(service: FaultyService, frame: Frame) -> None:
    """Answer an earlier request again, and this one not at all."""
    answer(service, frame, sequence=1)


def future(service: FaultyService, frame: Frame) -> None:
    """Answer a request that was never sent."""
    answer(service, frame, sequence=frame.header.sequence + 100)


def late(service: FaultyService, frame: Frame) -> None:
    """Answer correctly, but long after the deadline."""
    time.sleep(LATE_S)
    Service._compute(service, frame)


def other_version(service: FaultyService, frame: Frame) -> None:
    """Answer with weights of another version."""
    answer(service, frame, version=frame.header.version + 1)


def other_rows(service: FaultyService, frame: Frame) -> None:
    """Answer with fewer rows."""
    answer(service, frame, num_rows=frame.header.num_rows - 1)


def other_bytes(service: FaultyService, frame: Frame) -> None:
    """Answer with fewer bytes than the rows have."""
    answer(service, frame, payload_bytes=result(frame).payload_bytes - 4)


def forgotten(service: FaultyService, frame: Frame) -> None:
    """Serve weights that were never committed."""
    memory: ExpertMemory = service._weights()
    memory.version = 0
    Service._compute(service, frame)


def truncated(service: FaultyService, frame: Frame) -> None:
    """Send the first half of a frame and end."""
    service.send_raw(pack(result(frame))[:30])
    raise PeerLost("the worker ends")


def oversized(service: FaultyService, frame: Frame) -> None:
    """Announce a terabyte."""
    service.send_raw(pack(result(frame, slot=0xFFFF, payload_bytes=1 << 40)))


def garbage(service: FaultyService, frame: Frame) -> None:
    """Send bytes without a header."""
    service.send_raw(b"HTTP/1.1 400 Bad Request\r\n" * 4)


def wrong_json(service: FaultyService, frame: Frame) -> None:
    """Send an error whose text is a number."""
    json = b'{"message": 3}'
    service._send(Header(FrameKind.ERROR, sequence=frame.header.sequence, json_bytes=len(json)), json)


FAULTS: dict[Any, str] = {
    stale: "waited",
    late: "waited",
    future: "never sent",
    other_version: "weight version 2",
    other_rows: "39 rows|rows of 16 numbers",
    other_bytes: "announced",
    forgotten: "worker has 0",
    truncated: "in the middle of a frame",
    oversized: "oversized RESULT",
    garbage: "begins with",
    wrong_json: "instead of a value of type",
}


@pytest.mark.parametrize("transport", ["shared", "socket"])
@pytest.mark.parametrize("fault", FAULTS)
def test_a_worker_that_answers_wrongly(
    fault: Callable[[FaultyService, Frame], None], transport: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With required the error names the fault; with fallback the engine computes, with respawn a new worker answers."""

    monkeypatch.setattr("slime_like_plugins.remote_experts.link.ExpertProcess", ThreadProcess)
    monkeypatch.setenv("SLIME_LIKE_DEADLINE_FACTOR", "1")
    monkeypatch.setattr(FaultyService, "fault", fault, raising=False)
    seconds = DEADLINE_S if fault in (stale, late) else 20.0
    for policy in ("required", "fallback", "respawn"):
        monkeypatch.setattr(FaultyService, "remaining", 1)
        with experts_of(replace(OPTIONS, policy=policy, transport=transport, deadline_s=seconds)) as experts:
            started = time.monotonic()
            if policy == "required":
                with pytest.raises(RemoteExpertsLost, match=FAULTS[fault]):
                    assert_sums(experts)
            else:
                assert_sums(experts)
                assert experts.state.is_replaced == (policy == "fallback")
            assert time.monotonic() - started < 15
            if fault is stale:
                assert experts.traffic.stale_replies == 1


def test_an_inconsistent_report_of_incomplete_matrices_fails_the_update(monkeypatch: pytest.MonkeyPatch) -> None:
    """An exception would end this rank, and the other ranks of the engine would wait for it."""
    monkeypatch.setattr("slime_like_plugins.remote_experts.link.ExpertProcess", ThreadProcess)
    monkeypatch.setattr(FaultyService, "remaining", 0)
    report = {"names": ["a", "b"], "counts": [1], "totals": [1, 2]}

    def acknowledge(service: FaultyService, frame: Frame, fields: Any = None) -> None:
        Service._acknowledge(service, frame, report if frame.header.kind is FrameKind.CHECK else fields)

    with experts_of(replace(OPTIONS, deadline_s=20.0)) as experts:
        monkeypatch.setattr(FaultyService, "_acknowledge", acknowledge)
        assert "reported 2 names, 1 counts and 2 totals of incomplete matrices" in update(experts)
