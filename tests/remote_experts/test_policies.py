"""Workers that are killed, stopped, slow, or answer wrongly: each ends as its policy says within the deadline, and nothing is lost."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Generator
from dataclasses import replace
from typing import Any

import numpy as np
import psutil
import pytest
import torch

from slime_like.config.schema.remote_experts import RemoteOptions
from slime_like.errors import SlimeLikeError
from slime_like.util.deadline import Deadline, scale
from slime_like_plugins.remote_experts.compute import expert_sums
from slime_like_plugins.remote_experts.connection import Connection, PeerLost
from slime_like_plugins.remote_experts.experts import RemoteExperts, RemoteExpertsLost, WorkerFault
from slime_like_plugins.remote_experts.frames import Frame, FrameKind, Header, pack
from slime_like_plugins.remote_experts.memory import ExpertMemory
from slime_like_plugins.remote_experts.mode import STREAM_ROWS
from slime_like_plugins.remote_experts.process import ExpertProcess, WorkerOrigin
from slime_like_plugins.remote_experts.routing import ExpertRows, split
from slime_like_plugins.remote_experts.serving import Service, WorkerSettings
from slime_like_plugins.remote_experts.worker import serve
from tests.remote_experts.workers import SHAPES, reference, weights_of

LAYER = 3
ROWS = ExpertRows(5, (1, 4))  # two of five are remote
MATRICES = weights_of(replace(SHAPES, layers=(LAYER,), num_experts=(5,)))[LAYER]
LOCAL = {name: matrix[[0, 2, 3]] for name, matrix in MATRICES.items()}
REMOTE = {name: matrix[[1, 4]] for name, matrix in MATRICES.items()}
DEADLINE_S, LATE_S = 0.5, 5.0
OPTIONS = RemoteOptions(count=2, capacity=64, deadline_s=DEADLINE_S)
PATIENT = replace(OPTIONS, deadline_s=20.0)
BOUNDS = {"float32": 1e-6, "float16": 4e-3, "bfloat16": 3e-2}  # of sums, relative to the largest one


def batch(num: int = 40, seed: int = 0) -> tuple[Any, Any, Any]:
    """Return hidden states, ids and weights of tokens with two experts each."""
    rng = np.random.default_rng(seed)
    x = torch.from_numpy(rng.standard_normal((num, SHAPES.hidden)).astype(np.float32))
    ids = np.array([rng.permutation(5)[:2] for _ in range(num)], np.int32)
    return x, ids, rng.random((num, 2)).astype(np.float32)


def update(experts: RemoteExperts, factor: float = 1.0) -> str:
    """Push weights, as SGLang's loaders do. Returns the failure."""
    experts.begin()
    for layer, matrices in ((0, weights_of(SHAPES)[0]), (LAYER, REMOTE)):
        for name, matrix in matrices.items():
            for expert, rows in enumerate(matrix * factor):
                half = len(rows) // 2
                experts.write(layer, name, expert, 0, rows[:half])
                experts.write(layer, name, expert, half, rows[half:])
    incomplete, failure = experts.unwritten()
    assert not incomplete
    return failure or experts.commit()


def assert_sums(
    experts: RemoteExperts, remote_factor: float = 1.0, seed: int = 0, num: int = 40, bound: float = 1e-6
) -> torch.Tensor:
    """Assert that the sums of a batch are those of all experts in one memory. Returns them."""
    x, ids, weights = batch(num, seed)
    local, buckets = split(ids, weights, ROWS)
    sums = experts.add_sums(
        LAYER, x, buckets, lambda feed: expert_sums(x, local, weights, LOCAL["w13"], LOCAL["w2"], feed)
    )
    every = {name: matrix.clone() for name, matrix in MATRICES.items()}
    for matrix in every.values():
        matrix[[1, 4]] *= remote_factor
    expected = reference(x, ids, weights, every)
    np.testing.assert_allclose(sums, expected, rtol=0, atol=bound * float(expected.abs().max()))
    return sums


class ForkedProcess(ExpertProcess):
    """Worker process without the import of torch, which takes seconds."""

    settings = WorkerSettings()

    def __init__(self, origin: object) -> None:
        self.socket, theirs = socket.socketpair()
        self._pid = os.fork()
        if not self._pid:
            try:
                self.socket.close()
                torch.set_num_threads(1)
                serve(theirs, self.settings)
            finally:
                os._exit(0)
        theirs.close()
        self._process: Any = ForkedChild(self._pid)

    @property
    def pid(self) -> int:
        return self._pid


class ForkedChild:
    """The part of ``subprocess.Popen`` that ends a child."""

    def __init__(self, pid: int) -> None:
        self._child = psutil.Process(pid)

    def wait(self, timeout: float) -> None:
        """Wait until the child has ended."""
        try:
            self._child.wait(timeout)
        except psutil.TimeoutExpired as error:
            raise subprocess.TimeoutExpired("worker", timeout) from error

    def send_signal(self, number: int) -> None:
        """Send a signal if the child has not ended."""
        with contextlib.suppress(psutil.NoSuchProcess):
            self._child.send_signal(number)


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


@pytest.fixture(autouse=True)
def forked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fork workers, instead of starting another interpreter."""
    monkeypatch.setattr("slime_like_plugins.remote_experts.link.ExpertProcess", ForkedProcess)


@contextlib.contextmanager
def experts_of(options: RemoteOptions) -> Generator[RemoteExperts]:
    """Yield remote experts with committed weights in a worker process."""
    experts = RemoteExperts(options, 0)
    try:
        experts.start()
        experts.open(replace(SHAPES, capacity=options.capacity))
        assert update(experts) == ""
        yield experts
    finally:
        experts.close()


def worker_of(experts: RemoteExperts) -> psutil.Process:
    """Return the worker's process."""
    process = experts._link._process
    assert process is not None
    return psutil.Process(process.pid)


def kill(process: psutil.Process) -> None:
    """End a worker as the kernel does when memory runs out."""
    process.kill()


def stop(process: psutil.Process) -> None:
    """Stop a worker, which then lives but does not answer."""
    process.send_signal(signal.SIGSTOP)


@pytest.mark.parametrize("dtype", BOUNDS)
def test_sums_are_the_same_in_every_mode_over_every_transport(dtype: str) -> None:
    """Both transports have the same bits; modes differ by the rounding of products of another size."""
    calls: dict[str, int] = {}
    for mode in ("batched", "stream", "auto"):
        results: list[torch.Tensor] = []
        for transport in ("shared", "socket"):
            options = replace(PATIENT, mode=mode, transport=transport, payload_dtype=dtype)
            with experts_of(options) as experts:
                results.append(assert_sums(experts, num=150, bound=BOUNDS[dtype]))
                assert experts._link.client.transport == transport
                calls[mode] = experts.traffic.calls
        assert torch.equal(*results)
    assert calls["auto"] == calls["batched"] < calls["stream"]


@pytest.mark.parametrize(
    ("capacity", "mode", "max_rows"),
    [(1, "batched", 1), (1, "stream", 1), (31, "stream", 31), (4096, "stream", STREAM_ROWS), (4096, "batched", 4096)],
)
def test_no_request_is_larger_than_the_capacity(capacity: int, mode: str, max_rows: int) -> None:
    with experts_of(replace(PATIENT, capacity=capacity, mode=mode)) as experts:
        assert_sums(experts, num=150)
        _, buckets = split(*batch(150)[1:], ROWS)
        assert experts.traffic.calls == sum(-(-len(bucket.tokens) // max_rows) for bucket in buckets)


def test_the_worker_computes_while_the_engine_does() -> None:
    """Requests leave before the engine computes its own experts, and replies arrive between two of them."""
    with experts_of(PATIENT) as experts:
        x, ids, weights = batch(60)
        local, buckets = split(ids, weights, ROWS)
        assert len(buckets) > 1
        pending, deadline = experts._link.client._pending, Deadline("a test", "receive replies", 20.0)

        def compute_local(feed: Callable[[], None]) -> torch.Tensor:
            assert len(pending) == len(buckets)
            while pending:
                feed()
                deadline.remaining("the worker")
            return expert_sums(x, local, weights, LOCAL["w13"], LOCAL["w2"], feed)

        sums = experts.add_sums(LAYER, x, buckets, compute_local)
        assert torch.equal(sums, assert_sums(experts, num=60))


@pytest.mark.parametrize("policy", ["required", "fallback", "respawn"])
def test_a_slow_worker_within_the_deadline_is_kept(policy: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The sums have the bits of those of a fast worker."""
    results: list[torch.Tensor] = []
    for slowdown in (1.0, 10.0):
        monkeypatch.setattr(ForkedProcess, "settings", WorkerSettings(slowdown=slowdown))
        with experts_of(replace(PATIENT, policy=policy)) as experts:
            results.append(assert_sums(experts))
            assert experts.state == WorkerFault(0, False)
    assert torch.equal(*results)


@pytest.mark.parametrize("fault", [kill, stop])
@pytest.mark.parametrize("policy", ["required", "fallback", "respawn"])
def test_a_worker_that_ends_or_stalls(policy: str, fault: Callable[[psutil.Process], None]) -> None:
    options = replace(OPTIONS, policy=policy)
    with experts_of(options) as experts:
        assert_sums(experts)
        process = worker_of(experts)
        fault(process)
        started = time.monotonic()
        if policy == "required":
            with pytest.raises(RemoteExpertsLost, match=r"worker of remote experts of rank 0 \(pid .*policy=fallback"):
                assert_sums(experts, seed=1)
        else:
            assert_sums(experts, seed=1)
            assert experts.state.is_replaced == (policy == "fallback")
            assert experts.state.num_restarts == (policy == "respawn")
        limit = DEADLINE_S * scale() + 5.0 + (60 if policy == "respawn" else 0)
        assert time.monotonic() - started < limit
        assert not process.is_running() or process.status() == psutil.STATUS_ZOMBIE
        if policy != "required":
            assert update(experts, 2.0) == ""
            assert_sums(experts, 2.0, seed=2)


def test_a_worker_that_ends_during_an_update(monkeypatch: pytest.MonkeyPatch) -> None:
    """The update itself reports the failure, a new worker gets what was written so far, and close never hangs."""
    with experts_of(OPTIONS) as experts:
        kill(worker_of(experts))
        assert "of rank 0" in update(experts)
        assert "has failed before" in update(experts)
    with experts_of(replace(OPTIONS, policy="respawn")) as experts:
        written = experts.write
        calls: list[int] = []

        def write(*arguments: Any) -> None:
            calls.append(1)
            if len(calls) == 5:
                kill(worker_of(experts))
            written(*arguments)

        monkeypatch.setattr(experts, "write", write)
        assert update(experts, 3.0) == ""
        assert_sums(experts, 3.0)
        process = worker_of(experts)
        stop(process)
        started = time.monotonic()
    assert time.monotonic() - started < 4 + 3 * scale()
    assert not process.is_running()


def test_a_worker_that_ends_before_the_check_of_an_incomplete_update() -> None:
    """With fallback, the engine's copy is checked instead: rows that were not sent are not served."""
    with experts_of(replace(OPTIONS, policy="fallback")) as experts:
        experts.begin()
        kill(worker_of(experts))
        incomplete, failure = experts.unwritten()
        assert experts.state.is_replaced and not failure
        assert len(incomplete) == 2 * sum(SHAPES.num_experts) and all(
            missing == total for _, missing, total in incomplete
        )


@pytest.mark.slow
def test_a_worker_ends_with_its_engine() -> None:
    """The engine is killed before it can send a message; its worker reads end-of-file."""
    reader, writer = os.pipe()
    engine = os.fork()
    if not engine:
        try:
            worker = ExpertProcess(WorkerOrigin())
            os.write(writer, str(worker.pid).encode())
            time.sleep(60)
        finally:
            os._exit(1)
    os.close(writer)
    worker = psutil.Process(int(os.read(reader, 20)))
    os.kill(engine, signal.SIGKILL)
    os.waitpid(engine, 0)
    psutil.wait_procs([worker], timeout=30 * scale())
    assert not worker.is_running()


# ---- wrong answers, from workers in a thread -------------------------------------------------------------------------
class FaultyService(Service):
    """Worker that answers computations by ``fault``."""

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
        """Send bytes that are no frame."""
        self._connection._outgoing.append(memoryview(data))
        self._connection.pump()


def result(frame: Frame, **changes: Any) -> Header:
    """Return the header of a right answer with changes."""
    h = frame.header
    size = h.num_rows * h.hidden * 4
    answer = Header(
        FrameKind.RESULT, h.sequence, h.version, h.layer, h.num_rows, 0, h.hidden, h.row_type, h.slot, 0, size
    )
    return replace(answer, **changes)


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
    wrong_json: "of another type",
}


@pytest.mark.parametrize("transport", ["shared", "socket"])
@pytest.mark.parametrize("fault", FAULTS)
def test_a_worker_that_answers_wrongly(
    fault: Callable[[FaultyService, Frame], None], transport: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """required names the fault; fallback computes; respawn asks a new worker, which is right."""

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


def test_a_worker_that_always_fails_is_replaced_a_few_times(monkeypatch: pytest.MonkeyPatch) -> None:
    experts = RemoteExperts(replace(OPTIONS, policy="respawn"), 0)
    opened: list[int] = []

    def fail(shapes: object) -> None:
        opened.append(1)
        raise PeerLost("it fails")

    monkeypatch.setattr(experts._link, "open", fail)
    experts._shapes, experts._copy = SHAPES, ExpertMemory(SHAPES, torch.device("cpu"))
    with pytest.raises(RemoteExpertsLost, match="after 3 new workers: it fails"):
        assert_sums(experts)
    assert len(opened) == 4
