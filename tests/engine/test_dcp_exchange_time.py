"""Time of DCP exchanges, measured by the host's clock and by simulated GPU events."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from slime_like.rollout.engine.connection import kv_usage
from slime_like_plugins.dcp import exchange_time
from slime_like_plugins.dcp.exchange_time import METHODS, STRIDE, DeviceClock, HostClock
from slime_like_plugins.kv_capacity import usage


class FakeCuda:
    """``torch.cuda`` with a clock that only exchanges advance."""

    def __init__(self) -> None:
        self.now, self.is_capturing, self.has_ended = 0.0, False, True
        gpu = self

        class Event:
            def __init__(self, *, enable_timing: bool, external: bool = False) -> None:
                assert enable_timing and external == gpu.is_capturing
                self.time: float | None = None

            def record(self) -> None:
                self.time = None if gpu.is_capturing else gpu.now

            def query(self) -> bool:
                return gpu.has_ended

            def elapsed_time(self, end: Any) -> float:
                if self.time is None or end.time is None:
                    raise RuntimeError("invalid resource handle")
                return end.time - self.time

        self.Event = Event

    def is_current_stream_capturing(self) -> bool:
        return self.is_capturing


@pytest.fixture
def group(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A group whose exchange of x milliseconds takes x milliseconds on the clock of ``gpu``."""
    monkeypatch.setattr(exchange_time, "_clocks", [])
    gpu = FakeCuda()

    def exchange(milliseconds: float) -> float:
        gpu.now += milliseconds
        return milliseconds

    return SimpleNamespace(gpu=gpu, **dict.fromkeys(METHODS, exchange))


def test_without_a_group_there_is_no_time(group: Any) -> None:
    assert exchange_time.take(3) is None


def test_the_host_measures_every_exchange_once(group: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exchange_time.time, "perf_counter", lambda: 1e-3 * group.gpu.now)
    exchange_time.measure(group, HostClock())
    assert [getattr(group, name)(4.0) for name in METHODS] == [4.0] * len(METHODS)
    assert exchange_time.take(1) == pytest.approx(4e-3 * len(METHODS))
    assert exchange_time.take(1) == 0


def test_eager_exchanges_on_a_gpu_are_sampled_and_read_when_they_have_ended(group: Any) -> None:
    exchange_time.measure(group, DeviceClock(group.gpu))
    for _ in range(3 * STRIDE):
        group.all_gather(1.0)
        group.gpu.now += 5.0  # other work
    group.gpu.has_ended = False
    assert exchange_time.take(0) == 0
    group.gpu.has_ended = True
    assert exchange_time.take(0) == pytest.approx(3e-3 * STRIDE)
    assert exchange_time.take(0) == 0


def test_the_last_replays_of_graphs_stand_for_all_replays(group: Any) -> None:
    clock = DeviceClock(group.gpu)
    exchange_time.measure(group, clock)
    for _ in range(2):  # graphs
        group.all_reduce(0.0)  # SGLang runs a batch before it captures it
        group.gpu.is_capturing = True
        for _ in range(2 * STRIDE):
            group.all_reduce(0.0)
        group.gpu.is_capturing = False
    first, second = clock._graphs
    assert clock.take(3) == 0, "no graph was replayed yet"

    def replay(graph: Any, milliseconds: float) -> None:
        for begin, end in graph.pairs:
            group.gpu.now += 1.0
            begin.record()
            group.gpu.now += milliseconds
            end.record()

    replay(first, 9.0)
    replay(first, 2.0)
    per_step = 2e-3 * len(first.pairs) * STRIDE
    assert len(first.pairs) == 2
    assert exchange_time.take(10) == pytest.approx(10 * per_step)
    assert exchange_time.take(10) == 0, "no graph was replayed since"
    replay(first, 2.0)
    replay(second, 4.0)
    assert exchange_time.take(10) == pytest.approx(15 * per_step)


def test_only_decode_steps_that_replayed_a_graph_count_as_replays(monkeypatch: pytest.MonkeyPatch) -> None:
    """Events outside graphs measure the exchanges of the other steps."""
    monkeypatch.setattr(usage, "counts", usage.Counts())
    monkeypatch.setattr(exchange_time, "_clocks", [SimpleNamespace(take=float)])  # a second per replay
    stats = SimpleNamespace(full_capacity=8, get_kv_token_stats=lambda: (4, 0.5))
    scheduler = SimpleNamespace(pool_stats_observer=SimpleNamespace(get_pool_stats=lambda: stats))
    for is_decode, replays in ((False, True), (True, True), (True, False), (True, True), (True, False)):
        result = SimpleNamespace(can_run_cuda_graph=replays)
        mode = SimpleNamespace(is_decode=lambda answer=is_decode: answer)
        batch = SimpleNamespace(forward_mode=mode, batch_size=lambda: 3)
        assert usage.run_batch(lambda *_, reply=result: reply, scheduler, batch) is result
    reports = [kv_usage({"internal_states": [{usage.STATE: usage.counts.report()}]}) for _ in range(2)]
    assert [(report.decode_steps, report.dcp_exchange_s) for report in reports] == [(4, 2.0), (0, 0.0)]
