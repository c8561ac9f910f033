"""Pool resizer: an added engine serves after a push and its probe; groups of a removed engine move to another one."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from slime_like.config.schema.faults import HealthConfig
from slime_like.data.share import SINGLE, ManagerShare
from slime_like.errors import ConfigError, EngineError
from slime_like.interfaces import Sampling
from slime_like.rollout.collect.sampler import CallJournal, PauseGate, ResumableEngine
from slime_like.rollout.manager import RolloutManager
from slime_like.rollout.pool.engine_pool import DEAD, EnginePool
from slime_like.rollout.pool.health import HealthMonitor
from slime_like.rollout.pool.resize import PoolResizer
from slime_like.rollout.pool.router import RequestCounts
from tests.rollout.slow_engine import SlowSupervisor

PROMPT = np.arange(2, 6, dtype=np.int32)


class SlowFactory:
    """Fake engine factory: starts wait for ``gate``, and the engines in ``broken`` fail to start."""

    def __init__(self, broken: frozenset[int] = frozenset()) -> None:
        self.gate, self.broken = asyncio.Event(), broken
        self.events: list[str] = []
        self.tasks: list[asyncio.Task[None]] = []

    async def create(self, index: int) -> Any:
        self.events.append(f"start {index}")
        try:
            await self.gate.wait()
        except asyncio.CancelledError:
            await asyncio.sleep(0.01)  # cleanup that has to be awaited
            self.events.append(f"cancelled {index}")
            raise
        if index in self.broken:
            raise EngineError(f"engine {index} has no GPU\nand a long log")
        supervisor = SlowSupervisor(random.Random(index), 0, f"engine {index}", 0)
        self.tasks += supervisor.tasks
        return supervisor

    async def end(self, index: int) -> None:
        self.events.append(f"end {index}")


def play(
    scene: Callable[[EnginePool, PoolResizer, SlowFactory], Awaitable[None]],
    *,
    pushes: bool = True,
    broken: frozenset[int] = frozenset(),
    share: ManagerShare = SINGLE,
) -> None:
    async def run() -> None:
        supervisors = [SlowSupervisor(random.Random(0), 0, f"engine {share.global_id(i)}", 0) for i in range(2)]
        pool: Any = EnginePool(supervisors, HealthConfig(), receives_pushes=pushes)  # pyright: ignore[reportArgumentType]
        factory = SlowFactory(broken)
        resizer = PoolResizer(pool, HealthMonitor(pool), factory, share)
        try:
            async with asyncio.timeout(10):
                await scene(pool, resizer, factory)
        finally:
            await resizer.stop()
            await pool.stop()
            for task in (*factory.tasks, *(task for supervisor in supervisors for task in supervisor.tasks)):
                task.cancel()

    asyncio.run(run())


@pytest.mark.parametrize(
    ("settings", "num_engines", "message"),
    [
        ({"has_fixed_gpus": True}, 3, "weights.transport=ipc no engine can be added.*set weights.transport=tensor"),
        ({"releases_memory": True}, 1, "placement.offload_rollout=true"),
        ({"has_fixed_gpus": True}, 1, ""),
        ({}, 3, ""),
    ],
)
def test_a_number_that_the_run_cannot_have_is_refused(
    settings: dict[str, bool], num_engines: int, message: str
) -> None:
    async def resize(number: int) -> str:
        return f"{number} engines"

    spec = {"has_fixed_gpus": False, "releases_memory": False, "share": SINGLE} | settings
    manager: Any = SimpleNamespace(
        _spec=SimpleNamespace(**spec),
        _resizer=SimpleNamespace(num_engines=2, resize=resize),
        _usage=SimpleNamespace(num_engines=2),
    )
    changed = RolloutManager.resize_engines(manager, num_engines)
    if not message:
        assert asyncio.run(changed) == f"{num_engines} engines"
        return
    with pytest.raises(ConfigError, match=rf"engines={num_engines}.*{message}"):
        asyncio.run(changed)


@pytest.mark.parametrize("has_fixed_gpus", [False, True])
def test_a_manager_takes_its_share_of_a_number_and_names_the_whole_number(has_fixed_gpus: bool) -> None:
    numbers: list[int] = []

    async def resize(number: int) -> str:
        numbers.append(number)
        return ""

    spec = SimpleNamespace(has_fixed_gpus=has_fixed_gpus, releases_memory=False, share=ManagerShare(1, 2))
    resizer, usage = SimpleNamespace(num_engines=2, resize=resize), SimpleNamespace(num_engines=2)
    manager: Any = SimpleNamespace(_spec=spec, _resizer=resizer, _usage=usage)
    asyncio.run(RolloutManager.resize_engines(manager, 4))
    assert (numbers, usage.num_engines) == ([2], 2)
    if has_fixed_gpus:
        with pytest.raises(ConfigError, match=r"^engines=6: with weights\.transport=ipc"):
            asyncio.run(RolloutManager.resize_engines(manager, 6))
    else:
        asyncio.run(RolloutManager.resize_engines(manager, 6))
        assert (numbers, usage.num_engines) == ([2, 3], 3)


async def started(resizer: PoolResizer, pool: EnginePool, count: int) -> None:
    while len(pool.slots) < count:
        await asyncio.sleep(0)
    assert resizer.num_engines == count


def names(pool: EnginePool) -> list[str]:
    return [engine.name for engine in pool.router.engines]


def test_an_added_engine_serves_only_after_a_push_and_its_probe() -> None:
    async def scene(pool: EnginePool, resizer: PoolResizer, factory: SlowFactory) -> None:
        assert await resizer.resize(3) == "3 engines: engine 2 started, to serve after a push and its probe"
        assert resizer.num_engines == 3 and len(pool.slots) == 2, "it starts in the background"
        factory.gate.set()
        await started(resizer, pool, 3)
        assert names(pool) == ["engine 0", "engine 1"] and resizer.num_unproven() == 0
        for slot in await pool.wait_for_reachable():
            pool.admit(slot, 5)  # a push reaches it
        assert names(pool) == ["engine 0", "engine 1"] and resizer.num_unproven() == 1
        resizer.admit_proven(4)
        assert names(pool) == ["engine 0", "engine 1"], "the probe compared other weights"
        resizer.admit_proven(5)
        assert names(pool) == ["engine 0", "engine 1", "engine 2"] and resizer.num_unproven() == 0
        assert [message for message in pool.drain_messages() if "engine 2" in message] == [
            "engine 2 is up; it serves after the next push and its probe",
            "engine 2 serves",
        ]

    play(scene)


def test_an_added_engine_that_is_lost_before_the_probe_is_proven_by_the_next_one() -> None:
    async def scene(pool: EnginePool, resizer: PoolResizer, factory: SlowFactory) -> None:
        factory.gate.set()
        await resizer.resize(3)
        await started(resizer, pool, 3)
        slot = pool.slots[2]
        pool.admit(slot, 5)
        pool.mark_lost(slot, DEAD, EngineError("engine 2 died"))
        assert resizer.num_unproven() == 0
        while slot.is_restarting:
            await asyncio.sleep(0)
        resizer.admit_proven(5)
        assert names(pool) == ["engine 0", "engine 1"], "its new process has the weights of the checkpoint"
        pool.admit(slot, 6)
        resizer.admit_proven(6)
        assert names(pool) == ["engine 0", "engine 1", "engine 2"]

    play(scene)


def test_groups_of_a_removed_engine_are_finished_elsewhere() -> None:
    async def scene(pool: EnginePool, resizer: PoolResizer, factory: SlowFactory) -> None:
        async def answer(seed: int) -> list[int]:
            with pool.router.assign(100) as assignment:
                engine = ResumableEngine(pool, assignment, CallJournal(), PauseGate(), RequestCounts(2))
                (completion,) = await engine.generate(PROMPT, [seed], Sampling(1.0, 100))
                return completion.token_ids.tolist()

        tasks = [asyncio.create_task(answer(seed)) for seed in range(6)]
        while not all(slot.client._requests for slot in pool.slots):  # pyright: ignore[reportAttributeAccessIssue]
            await asyncio.sleep(0)
        removed_engine = pool.slots[1].client
        assert await resizer.resize(1) == "1 engine: engine 1 removed"
        answers = await asyncio.gather(*tasks)
        assert [len(answer) for answer in answers] == [100] * 6
        assert removed_engine not in pool.router.engines and [slot.client.name for slot in pool.slots] == ["engine 0"]
        assert pool.take_restart_counts() == (0, 3), "three groups moved, nothing was restarted"
        assert factory.events == ["end 1"]
        with pytest.raises(ConfigError, match="engines=0: a run needs at least one engine"):
            await resizer.resize(0)

    play(scene)


def test_groups_of_a_removed_engine_are_not_added_to_its_earlier_recovery() -> None:
    async def scene(pool: EnginePool, resizer: PoolResizer, factory: SlowFactory) -> None:
        slot = pool.slots[1]
        pool.mark_lost(slot, DEAD, EngineError("engine 1 died"))
        while slot.is_restarting:
            await asyncio.sleep(0)
        for reached in await pool.wait_for_reachable():
            pool.admit(reached, 5)

        async def answer(seed: int) -> None:
            with pool.router.assign(100) as assignment:
                engine = ResumableEngine(pool, assignment, CallJournal(), PauseGate(), RequestCounts(2))
                await engine.generate(PROMPT, [seed], Sampling(1.0, 100))

        tasks = [asyncio.create_task(answer(seed)) for seed in range(2)]
        while not slot.client._requests:  # pyright: ignore[reportAttributeAccessIssue]
            await asyncio.sleep(0)
        await resizer.resize(1)
        await asyncio.gather(*tasks)
        assert pool.take_restart_counts() == (1, 1)
        assert [recovery.groups for recovery in pool.recoveries] == [0]

    play(scene)


def test_engines_of_a_share_have_indices_that_no_other_manager_uses() -> None:
    async def scene(pool: EnginePool, resizer: PoolResizer, factory: SlowFactory) -> None:
        factory.gate.set()
        assert await resizer.resize(4) == "4 engines: engine 5, engine 7 started, to serve after a push and its probe"
        await started(resizer, pool, 4)
        assert [slot.client.name for slot in pool.slots] == [f"engine {i}" for i in (1, 3, 5, 7)]
        assert await resizer.resize(1) == "1 engine: engine 3, engine 5, engine 7 removed"

    play(scene, share=ManagerShare(1, 2))


def test_the_start_of_a_removed_engine_is_cancelled_and_awaited() -> None:
    async def scene(pool: EnginePool, resizer: PoolResizer, factory: SlowFactory) -> None:
        await resizer.resize(4)
        await asyncio.sleep(0)
        assert await resizer.resize(3) == "3 engines: engine 3 removed", "not one that serves"
        assert factory.events == ["start 2", "start 3", "cancelled 3", "end 3"]
        pool.mark_lost(pool.slots[1], DEAD, EngineError("engine 1 died"))
        assert await resizer.resize(1) == "1 engine: engine 1, engine 2 removed", "one of them is being restarted"
        assert names(pool) == ["engine 0"] and resizer.num_engines == 1
        assert set(factory.events[4:]) == {"cancelled 2", "end 2", "end 1"}
        assert await resizer.resize(1) == "1 engine, as before"

    play(scene)


def test_an_engine_that_does_not_start_is_given_up_with_its_reason() -> None:
    async def scene(pool: EnginePool, resizer: PoolResizer, factory: SlowFactory) -> None:
        factory.gate.set()
        await resizer.resize(4)
        await started(resizer, pool, 3)
        assert names(pool) == ["engine 0", "engine 1", "engine 3"], "without pushes it serves at once"
        assert "engine 2 is not added: engine 2 has no GPU" in pool.drain_messages()
        assert sorted(factory.events) == ["end 2", "start 2", "start 3"], "the resources of engine 2 are freed once"
        assert await resizer.resize(4) == "4 engines: engine 2 started, to serve once up"

    play(scene, pushes=False, broken=frozenset({2}))
