"""Sums of remote experts, and the policies for a worker that is killed, stopped or slow."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from slime_like.util.deadline import Deadline, scale
from slime_like_plugins.remote_experts.compute import expert_sums
from slime_like_plugins.remote_experts.connection import PeerLost
from slime_like_plugins.remote_experts.experts import RemoteExperts, RemoteExpertsLost, WorkerState
from slime_like_plugins.remote_experts.link import WorkerLink
from slime_like_plugins.remote_experts.memory import ExpertMemory
from slime_like_plugins.remote_experts.mode import STREAM_ROWS
from slime_like_plugins.remote_experts.process import ExpertProcess, WorkerOrigin
from slime_like_plugins.remote_experts.routing import split
from slime_like_plugins.remote_experts.serving import WorkerSettings
from slime_like_plugins.remote_experts.worker import serve
from tests.process_states import is_alive
from tests.remote_experts.forked_layer import (
    BOUNDS,
    DEADLINE_S,
    LAYER,
    LOCAL,
    OPTIONS,
    PATIENT,
    ROWS,
    ForkedProcess,
    assert_sums,
    batch,
    experts_of,
    update,
)
from tests.remote_experts.workers import SHAPES, private_key


@pytest.fixture(autouse=True)
def forked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fork workers instead of starting another interpreter."""
    monkeypatch.setattr("slime_like_plugins.remote_experts.link.ExpertProcess", ForkedProcess)


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
    """Sums are bitwise equal over both transports; modes differ by rounding, since the sizes of their GEMMs differ."""
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
    """Requests are sent before the engine computes its own experts, and replies are read between these experts."""
    with experts_of(PATIENT) as experts:
        x, ids, weights = batch(100)
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
        assert torch.equal(sums, assert_sums(experts, num=100))


@pytest.mark.parametrize("policy", ["required", "fallback", "respawn"])
def test_a_slow_worker_within_the_deadline_is_kept(policy: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The sums are bitwise equal to those of a fast worker."""
    results: list[torch.Tensor] = []
    for slowdown in (1.0, 10.0):
        monkeypatch.setattr(ForkedProcess, "settings", WorkerSettings(slowdown=slowdown))
        with experts_of(replace(PATIENT, policy=policy)) as experts:
            results.append(assert_sums(experts))
            assert experts.state == WorkerState(0, False)
    assert torch.equal(*results)


@pytest.mark.parametrize("fault", [kill, stop])
@pytest.mark.parametrize("policy", ["required", "fallback", "respawn"])
def test_a_worker_that_ends_or_stalls(policy: str, fault: Callable[[psutil.Process], None]) -> None:
    options = replace(OPTIONS, policy=policy)
    with experts_of(options) as experts:
        assert_sums(experts)
        process = worker_of(experts)
        fault(process)
        start = time.monotonic()
        if policy == "required":
            with pytest.raises(RemoteExpertsLost, match=r"worker of remote experts of rank 0 \(pid .*policy=fallback"):
                assert_sums(experts, seed=1)
        else:
            assert_sums(experts, seed=1)
            assert experts.state.is_replaced == (policy == "fallback")
            assert experts.state.num_restarts == (policy == "respawn")
        limit = DEADLINE_S * scale() + 5.0 + (60 if policy == "respawn" else 0)
        assert time.monotonic() - start < limit
        assert not is_alive(process.pid)
        if policy != "required":
            assert update(experts, 2.0) == ""
            assert_sums(experts, 2.0, seed=2)


def test_a_link_without_a_worker_states_the_reason() -> None:
    link = WorkerLink(OPTIONS, 0)
    reasons = {None: "has not been connected", link.abandon: "has failed before", link.close: "has been closed"}
    for end, reason in reasons.items():
        if end is not None:
            end()
        with pytest.raises(PeerLost, match=rf"of rank 0 \(not started\) {reason}"):
            _ = link.client


def test_a_worker_that_ends_during_an_update(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """The update reports the failure, a new worker gets the weights written so far, and ``close`` does not hang."""
    with experts_of(OPTIONS) as experts:
        kill(worker_of(experts))
        assert "of rank 0" in update(experts)
        assert "has failed before" in update(experts)
    with experts_of(replace(OPTIONS, policy="respawn")) as experts:
        original_write = experts.write
        calls: list[int] = []

        def write(*arguments: Any) -> None:
            calls.append(1)
            if len(calls) == 5:
                kill(worker_of(experts))
            original_write(*arguments)

        monkeypatch.setattr(experts, "write", write)
        assert update(experts, 3.0) == ""
        assert "a new worker replaces it" in caplog.text
        assert_sums(experts, 3.0)
        process = worker_of(experts)
        stop(process)
        start = time.monotonic()
    assert time.monotonic() - start < 4 + 3 * scale()
    assert not process.is_running()


def test_a_worker_that_ends_before_the_check_of_an_incomplete_update() -> None:
    """With fallback, the engine's copy of the weights is checked, so missing rows are reported."""
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


def test_a_worker_that_always_fails_is_replaced_a_few_times(monkeypatch: pytest.MonkeyPatch) -> None:
    experts = RemoteExperts(replace(OPTIONS, policy="respawn"), 0)
    openings: list[int] = []

    def fail(*_: object) -> None:
        openings.append(1)
        raise PeerLost("it fails")

    monkeypatch.setattr(experts._link, "open", fail)
    experts._shapes, experts._copy = SHAPES, ExpertMemory(SHAPES, torch.device("cpu"))
    with pytest.raises(RemoteExpertsLost, match="after 3 new workers: it fails"):
        assert_sums(experts)
    assert len(openings) == 4


def test_a_worker_that_was_lost_in_a_failed_update_is_reported_by_the_next_forward() -> None:
    experts = RemoteExperts(replace(OPTIONS, policy="required"), 0)
    experts._shapes = SHAPES
    with pytest.raises(RemoteExpertsLost, match=r"lost in a failed weight update; .*policy=fallback or respawn"):
        assert_sums(experts)


def test_a_listening_worker_that_nobody_starts_again_ends_the_engine_soon(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With respawn, reconnects have a shorter limit than starts, because four starts exceed SGLang's watchdog."""
    monkeypatch.setattr("slime_like_plugins.remote_experts.experts.RECONNECT_S", 0.3)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        path = private_key(tmp_path)
        address = f"127.0.0.1:{listener.getsockname()[1]}"
        serving = threading.Thread(target=serve_one, args=(listener, path.read_bytes()), daemon=True)
        serving.start()
        options = replace(PATIENT, policy="respawn", workers=(address,), key_file=str(path))
        with experts_of(options) as experts:
            assert_sums(experts)
            listener.close()
            experts._link.client._connection._socket.shutdown(socket.SHUT_WR)
            serving.join(20)
            start = time.monotonic()
            with pytest.raises(RemoteExpertsLost, match=f"after 3 new workers: .* cannot connect to {address}"):
                assert_sums(experts, seed=1)
            assert time.monotonic() - start < 20


def serve_one(listener: socket.socket, secret: bytes) -> None:
    """Serve one engine."""
    sock, _ = listener.accept()
    with contextlib.suppress(PeerLost):
        serve(sock, WorkerSettings(), secret)
