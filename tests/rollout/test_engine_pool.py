"""Engine pool: fatal errors end every wait, a push admits only engines that it reached, checks are independent."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from slime_like.config.schema.faults import HealthConfig
from slime_like.errors import EngineError, EngineLost, WeightSyncError
from slime_like.interfaces import Sampling
from slime_like.rollout.collect.journal import CallJournal
from slime_like.rollout.collect.sampler import PauseGate, ResumableEngine
from slime_like.rollout.pool.engine_pool import DEAD, EnginePool, first_line
from slime_like.rollout.pool.health import HealthMonitor
from slime_like.rollout.pool.kv_usage import kv_metrics
from slime_like.rollout.pool.router import RequestCounts
from slime_like.rollout.pool.weight_update import EngineWeightUpdate
from tests.rollout.slow_engine import SlowSupervisor

PROMPT = np.arange(2, 6, dtype=np.int32)


class Hung(SlowSupervisor):
    """Supervisor whose engine never generates and cannot be restarted."""

    async def restart(self) -> Any:
        raise EngineError(f"{self._name} does not start")


def play(
    kind: type[SlowSupervisor],
    health: HealthConfig,
    scene: Callable[[EnginePool, list[Any]], Awaitable[None]],
    *,
    receives_pushes: bool = True,
) -> None:
    async def run() -> None:
        supervisors = [kind(random.Random(0), 0, f"engine {i}", 0) for i in range(2)]
        pool = EnginePool(supervisors, health, receives_pushes=receives_pushes)  # pyright: ignore[reportArgumentType]
        tasks = [task for supervisor in supervisors for task in supervisor.tasks]
        if kind is Hung:
            for task in tasks:
                task.cancel()
        try:
            async with asyncio.timeout(10):
                await scene(pool, [supervisor.client for supervisor in supervisors])
        finally:
            await pool.stop()
            for task in (task for supervisor in supervisors for task in supervisor.tasks):
                task.cancel()

    asyncio.run(run())


async def let_run() -> None:
    """Let every task run until it waits."""
    for _ in range(50):
        await asyncio.sleep(0)


async def start_requests(pool: EnginePool) -> list[asyncio.Task[Any]]:
    """Start a request on each engine; return the waiting tasks."""

    async def ask() -> None:
        with pool.router.assign(9) as assignment:
            engine = ResumableEngine(pool, assignment, CallJournal(), PauseGate(), RequestCounts(2))
            await engine.generate(PROMPT, [7], Sampling(1.0, 9))

    tasks = [asyncio.create_task(ask()) for _ in pool.slots]
    await let_run()
    assert not any(task.done() for task in tasks)
    return tasks


def test_on_stalled_engine_stop_ends_every_wait() -> None:
    async def scene(pool: EnginePool, engines: list[Any]) -> None:
        requests = await start_requests(pool)
        with pytest.raises(EngineError, match="no answer"):
            pool.mark_stalled(pool.slots[0], EngineError("engine 0: no answer"))
        for task in requests:
            with pytest.raises(EngineError, match="engine 0: no answer"):
                await task
        with pytest.raises(EngineError, match="engine 0: no answer"):
            await pool.wait_for_reachable()
        await pool.wait_until_push_needed()  # returns, so that the driver starts the push that reports the error

    play(Hung, HealthConfig(on_stalled_engine="stop"), scene)


def test_an_engine_that_cannot_restart_ends_the_run() -> None:
    async def scene(pool: EnginePool, engines: list[Any]) -> None:
        requests = await start_requests(pool)
        engines[0].die()
        for task in requests:
            with pytest.raises(EngineError, match=r"engine 0 was lost .* health.max_restarts=2 .* does not start"):
                await task
        assert pool.slots[0].num_restarts == 3

    play(Hung, HealthConfig(max_restarts=2), scene)


def test_an_engine_replaced_during_a_push_is_not_admitted() -> None:
    async def scene(pool: EnginePool, engines: list[Any]) -> None:
        release = asyncio.Event()

        async def post(phase: str, *_: object) -> None:
            """Answer immediately."""

        async def late(phase: str, *_: object) -> None:
            if phase == "resume":
                await release.wait()

        for engine, verb in zip(engines, (post, late), strict=True):
            engine._connection = SimpleNamespace(post=verb, request=verb)
            engine.pause = engine.begin_update = lambda *_: post("")
        update = EngineWeightUpdate(pool)
        assert [address.name for address in await update.begin()] == ["engine 0", "engine 1"]
        resuming = asyncio.create_task(update.resume(5))
        await let_run()
        pool.mark_lost(pool.slots[0], DEAD, EngineLost("engine 0 is dead"))
        await let_run()
        assert not pool.slots[0].is_restarting and pool.slots[0].client is not engines[0]
        release.set()
        await resuming
        assert pool.router.engines == [engines[1]]
        assert pool.recoveries[0].joined == 0

    play(SlowSupervisor, HealthConfig(), scene)


def test_an_error_of_one_engine_cancels_the_update_of_the_others() -> None:
    async def scene(pool: EnginePool, engines: list[Any]) -> None:
        cancelled = asyncio.Event()

        async def pause(*_: object) -> None:
            """Answer immediately."""

        async def fail(*_: object, **__: object) -> None:
            raise WeightSyncError("engine 0 refuses the update")

        async def hang(*_: object, **__: object) -> None:
            try:
                await asyncio.Event().wait()
            except asyncio.CancelledError:
                cancelled.set()
                raise

        for engine, begin in zip(engines, (fail, hang), strict=True):
            engine.pause, engine.begin_update = pause, begin
        with pytest.raises(WeightSyncError, match="engine 0 refuses"):
            await EngineWeightUpdate(pool).begin()
        assert cancelled.is_set()

    play(SlowSupervisor, HealthConfig(), scene)


def test_a_check_cut_short_by_a_push_is_repeated_immediately() -> None:
    async def scene(pool: EnginePool, engines: list[Any]) -> None:
        decode_flags: list[bool] = []

        async def cut_short(seconds: float, *, decodes: bool) -> bool:
            pool.health.interval_s = 1e9  # no further round
            decode_flags.append(decodes)
            if decodes:
                pool.on_push_begin()
            return False

        async def well(seconds: float, *, decodes: bool) -> bool:
            return True

        for slot, health in zip(pool.slots, (cut_short, well), strict=True):
            slot.has_responded, slot.client.health = True, health  # pyright: ignore[reportAttributeAccessIssue]
        HealthMonitor(pool).start()
        while not pool.recoveries:
            await asyncio.sleep(0)
        assert decode_flags == [True, False]
        assert [recovery.engine for recovery in pool.recoveries] == ["engine 0"]

    play(SlowSupervisor, HealthConfig(interval_s=0.0), scene)


def test_a_hanging_check_does_not_block_checks_of_other_engines() -> None:
    async def scene(pool: EnginePool, engines: list[Any]) -> None:
        decode_flags: list[bool] = []

        async def hangs(seconds: float, *, decodes: bool) -> bool:
            await asyncio.Event().wait()
            return False

        async def well(seconds: float, *, decodes: bool) -> bool:
            decode_flags.append(decodes)
            return True

        for slot, health in zip(pool.slots, (hangs, well), strict=True):
            slot.has_responded, slot.client.health = True, health  # pyright: ignore[reportAttributeAccessIssue]
        HealthMonitor(pool).start()
        while len(decode_flags) < 3:
            await asyncio.sleep(0)

    play(SlowSupervisor, HealthConfig(interval_s=0.0), scene)


def test_engines_without_a_report_of_their_kv_cache_are_counted_and_named() -> None:
    async def scene(pool: EnginePool, engines: list[Any]) -> None:
        async def values() -> tuple[dict[str, float], list[str]]:
            metrics, warnings = await kv_metrics(pool)
            return {metric.name: metric.value for metric in metrics}, warnings

        healthy, warnings = await values()
        assert healthy["rollout/kv_engines_without_report"] == 0 and warnings == []
        engines[1].die()
        partial, warnings = await values()
        assert partial["rollout/kv_engines_without_report"] == 1 and partial.keys() == healthy.keys()
        assert warnings == ["the metrics of the KV cache lack engine 1 (engine 1 is dead)"]
        pool.router.withdraw(engines[0])
        metrics, warnings = await values()
        assert metrics == {"rollout/kv_engines_without_report": 2}
        assert "engine 0 (it serves no requests" in warnings[0]

    play(SlowSupervisor, HealthConfig(), scene)


@pytest.mark.parametrize("receives_pushes", [True, False])
def test_messages_say_when_an_engine_serves_again(*, receives_pushes: bool) -> None:
    """Without a trainer there is no push to wait for."""

    async def scene(pool: EnginePool, engines: list[Any]) -> None:
        pool.mark_stalled(pool.slots[0], EngineError("no answer"))
        _, (report, *_) = await kv_metrics(pool)
        pool.mark_responsive(pool.slots[0])
        assert (engines[0] in pool.router.engines) != receives_pushes
        pool.mark_lost(pool.slots[1], DEAD, EngineLost("it died"))
        stalled, responsive, lost = pool.drain_messages()
        assert "waiting for it" in stalled
        assert [("next push" in text) for text in (report, responsive, lost)] == [receives_pushes] * 3
        if not receives_pushes:
            assert "lost or stalled" in report and "it serves again" in responsive and "it serves once it is up" in lost

    play(SlowSupervisor, HealthConfig(on_stalled_engine="wait"), scene, receives_pushes=receives_pushes)


def test_an_error_without_a_message_is_reported_by_its_class() -> None:
    assert first_line(EngineError("engine 0 is dead\nend of its log")) == "engine 0 is dead"
    assert first_line(EngineError("")) == "EngineError"
