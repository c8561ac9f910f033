"""Pause gate between rollouts, and the counts by which a request recognises an abort of its own client."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any, cast

import pytest

from slime_like.config.schema.rollout import RolloutConfig
from slime_like.interfaces import Sampling
from slime_like.rollout.collect import sampler
from slime_like.rollout.collect.journal import CallJournal
from slime_like.rollout.collect.over_sampling import OverSamplingCollector
from slime_like.rollout.collect.sampler import PauseGate, ResumableEngine
from slime_like.rollout.engine.client import EngineClient
from slime_like.rollout.pool import router as router_module
from slime_like.rollout.pool.router import EngineRouter, RequestCounts
from slime_like.util.deadline import Deadline
from tests.rollout.counting import Counting


async def abort_nothing() -> None:
    """Abort nothing."""


async def shut(gate: PauseGate) -> None:
    await gate.shut(abort_nothing, Deadline("test", "stop", 30))


def test_a_gate_shut_again_stops_woken_tasks() -> None:
    async def scenario() -> list[str]:
        gate, passed = PauseGate(), list[str]()
        await shut(gate)

        async def pass_it() -> None:
            async with gate.passage():
                passed.append("passed")

        task = asyncio.create_task(pass_it())
        await asyncio.sleep(0)
        gate.open()  # wakes it
        await shut(gate)  # before it runs
        for _ in range(5):
            await asyncio.sleep(0)
        passed_while_shut = list(passed)
        gate.open()
        await task
        return passed_while_shut

    assert asyncio.run(scenario()) == []


def test_a_gate_measures_its_shut_time(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter([1.0, 4.0, 10.0, 10.5])
    monkeypatch.setattr(sampler, "time", SimpleNamespace(monotonic=lambda: next(clock)))

    async def scenario() -> list[float]:
        gate = PauseGate()
        times = [gate.shut_s]
        await shut(gate)  # at 1
        gate.open()  # at 4
        times.append(gate.shut_s)
        await shut(gate)  # at 10
        return [*times, gate.shut_s]  # at 10.5

    assert asyncio.run(scenario()) == [0.0, 3.0, 3.5]


def test_time_is_counted_once_if_no_engine_serves_while_the_gate_is_shut(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0
    for module in (sampler, router_module):
        monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: now))
    client = EngineClient("http://127.0.0.1:9", admin_key="")
    router = EngineRouter([client])
    group_sampler: Any = SimpleNamespace(pool=SimpleNamespace(router=router))
    gate = OverSamplingCollector(RolloutConfig(), Sampling(1.0, 1), Counting(), group_sampler, 1.0)._gate

    async def scenario() -> list[float]:
        nonlocal now
        engine = ResumableEngine(group_sampler.pool, cast(Any, None), CallJournal(), gate, RequestCounts(1))
        times: list[float] = []
        await shut(gate)
        now = 1.0
        router.withdraw(client)
        now = 3.0
        gate.open()
        times.append(engine.paused_s)
        now = 4.0
        await shut(gate)
        now = 6.0
        router.admit(client)
        now = 7.0
        gate.open()
        now = 9.0
        return [*times, engine.paused_s]

    assert asyncio.run(scenario()) == [3.0, 7.0]


def test_an_abort_counts_as_ended_only_after_its_request(monkeypatch: pytest.MonkeyPatch) -> None:
    client, num_ended = EngineClient("http://127.0.0.1:9", admin_key=""), list[int]()

    async def post(*request: Any) -> None:
        num_ended.append(client.num_ended_aborts)

    monkeypatch.setattr(client._connection, "post", post)
    asyncio.run(client.abort_all())
    assert (num_ended, client.num_aborts, client.num_ended_aborts) == ([0], 1, 1)
