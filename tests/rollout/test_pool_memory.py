"""Memory of a pool's engines by phase: order of requests, and restarts of lost engines once memory is available."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any, cast

import pytest

from slime_like.config.schema.faults import HealthConfig
from slime_like.config.schema.residency import COLLECT, ENGINE_PARTS, SAVE, STEP
from slime_like.errors import DeadlineExceeded, EngineError, EngineLost
from slime_like.rollout.engine.client import EngineClient
from slime_like.rollout.pool.engine_pool import DEAD, STALLED, EnginePool
from slime_like.rollout.pool.memory import PoolMemory
from slime_like.rollout.pool.weight_update import EngineWeightUpdate
from tests.rollout.slow_engine import SlowSupervisor
from tests.rollout.test_engine_pool import let_run, play

type Requests = list[tuple[str, Any]]


def record(pool: EnginePool, index: int) -> tuple[EngineClient, Requests]:
    """Give a slot a client with a fake connection; return the client, and the list of its requests (path, tags)."""
    requests: Requests = []

    async def post(phase: str, path: str, body: dict[str, Any], **_: object) -> None:
        requests.append((path.strip("/"), body.get("tags")))

    async def request(phase: str, verb: str, path: str, body: dict[str, Any] | None, **_: object) -> dict[str, Any]:
        requests.append((path.strip("/"), None))
        return {"weight_version": "1"}

    async def close() -> None: ...

    client = EngineClient("http://127.0.0.1:9", admin_key="", name=f"engine {index}")
    client._connection = SimpleNamespace(post=post, request=request, close=close)  # pyright: ignore[reportAttributeAccessIssue]
    pool.slots[index].client = client
    return client, requests


ALL = list(ENGINE_PARTS)


def test_memory_is_released_for_a_step_and_restored_by_the_push() -> None:
    async def scene(pool: EnginePool, engines: list[Any]) -> None:
        client, requests = record(pool, 0)
        record(pool, 1)
        memory, update = PoolMemory(pool), EngineWeightUpdate(pool)
        await memory.enter(STEP)
        assert requests == [("pause_generation", None), ("release_memory_occupation", ALL)]
        assert pool.is_pushing, "health checks must not decode"
        requests.clear()
        await memory.enter(COLLECT)
        assert requests == [], "an engine without weights stays paused until a push"
        await memory.enter(STEP)
        requests.clear()
        await update.begin()
        assert requests[1:] == [("resume_memory_occupation", ["weights"]), ("begin_weight_update", None)]
        requests.clear()
        await update.commit(1)
        paths = [path for path, _ in requests]
        assert paths.index("end_weight_update") < paths.index("resume_memory_occupation") < paths.index("flush_cache")
        assert ("resume_memory_occupation", ["kv_cache", "cuda_graph"]) in requests
        assert client.released == set()

    play(SlowSupervisor, HealthConfig(), scene)


def test_memory_is_restored_once_if_a_commit_is_cancelled_during_the_restore() -> None:
    """An error of another engine cancels the commit; SGLang's scheduler would exit at a second request for a part."""

    async def scene(pool: EnginePool, engines: list[Any]) -> None:
        client, requests = record(pool, 0)
        record(pool, 1)
        memory, update = PoolMemory(pool), EngineWeightUpdate(pool)
        await memory.enter(STEP)
        await update.begin()
        answered, post = asyncio.Event(), client._connection.post

        async def slow_post(phase: str, path: str, body: dict[str, Any], **options: Any) -> None:
            await post(phase, path, body, **options)
            if path == "/resume_memory_occupation":
                await answered.wait()

        client._connection.post = slow_post
        requests.clear()
        commit = asyncio.create_task(update.commit(1))
        await let_run()
        commit.cancel()
        abort = asyncio.create_task(update.abort())
        await let_run()
        assert client.released and not abort.done()
        answered.set()
        await abort
        assert [path for path, _ in requests].count("resume_memory_occupation") == 1 and client.released == set()

    play(SlowSupervisor, HealthConfig(), scene)


@pytest.mark.parametrize(
    ("refused_path", "resumed"),
    [
        ("/pause_generation", [False, True]),
        ("/begin_weight_update", [False, True]),
        ("/update_weight_version", [True, False]),
    ],
)
def test_an_abort_resumes_engines_whose_update_is_committed_or_not_begun(
    refused_path: str, resumed: list[bool]
) -> None:
    """An engine with all parameters but without their version would decode with new weights under the old version."""

    async def scene(pool: EnginePool, engines: list[Any]) -> None:
        (_, first), (client, second) = record(pool, 0), record(pool, 1)
        update, connection = EngineWeightUpdate(pool), client._connection
        for slot in pool.slots:
            pool.router.admit(slot.client)

        async def request(phase: str, verb: str, path: str, body: dict[str, Any] | None, **_: object) -> Any:
            if path == refused_path:
                raise EngineError(f"engine 1 refused {path}")
            return await connection.request(phase, verb, path, body)

        async def post(phase: str, path: str, body: dict[str, Any], **_: object) -> None:
            await request(phase, "POST", path, body)

        fake_connection = SimpleNamespace(post=post, request=request, close=connection.close)
        client._connection = fake_connection  # pyright: ignore[reportAttributeAccessIssue]
        with pytest.raises(EngineError, match=f"engine 1 refused {refused_path}"):
            await update.begin()
            await update.commit(1)
        first.clear()
        second.clear()
        await update.abort()
        assert [("continue_generation", None) in requests for requests in (first, second)] == resumed
        assert [slot.client in pool.router.engines for slot in pool.slots] == resumed

    play(SlowSupervisor, HealthConfig(), scene)


def test_a_save_keeps_the_weights() -> None:
    async def scene(pool: EnginePool, engines: list[Any]) -> None:
        (_, requests), _ = record(pool, 0), record(pool, 1)
        memory = PoolMemory(pool)
        await memory.enter(SAVE)
        await memory.enter(COLLECT)
        assert requests == [
            ("pause_generation", None),
            ("release_memory_occupation", ["kv_cache", "cuda_graph"]),
            ("resume_memory_occupation", ["kv_cache", "cuda_graph"]),
            ("continue_generation", None),
        ]
        assert not pool.is_pushing

    play(SlowSupervisor, HealthConfig(), scene)


def test_a_lost_engine_restarts_when_there_is_memory_for_it() -> None:
    async def scene(pool: EnginePool, engines: list[Any]) -> None:
        for index in range(2):
            record(pool, index)
        memory, update = PoolMemory(pool), EngineWeightUpdate(pool)
        await memory.enter(STEP)
        pool.mark_lost(pool.slots[0], DEAD, EngineLost("engine 0 is dead"))
        await let_run()
        assert pool.slots[0].is_restarting, "the trainer has the memory"
        await update.begin()
        await let_run()
        assert not pool.slots[0].is_restarting

    play(SlowSupervisor, HealthConfig(), scene)


def test_a_hung_engine_is_stopped_before_the_trainer_takes_the_memory() -> None:
    async def scene(pool: EnginePool, engines: list[Any]) -> None:
        client, requests = record(pool, 0)
        record(pool, 1)

        async def hang(*args: object, **kwargs: object) -> None:
            requests.append(("hung", None))
            await asyncio.Event().wait()

        client._connection.request = hang
        supervisors: list[Any] = [slot.supervisor for slot in pool.slots]
        step = asyncio.ensure_future(PoolMemory(pool).enter(STEP))
        await let_run()
        assert requests == [("hung", None)] and not step.done()
        pool.mark_lost(pool.slots[0], STALLED, EngineError("engine 0: its processes are stopped"))
        await step
        assert [supervisor.num_stops for supervisor in supervisors] == [1, 0]
        assert pool.slots[0].is_restarting

    play(SlowSupervisor, HealthConfig(), scene)


def test_a_checkpoint_can_be_saved_after_an_error_has_ended_the_run() -> None:
    async def scene(pool: EnginePool, engines: list[Any]) -> None:
        for index in range(2):
            record(pool, index)
        with pytest.raises(EngineLost, match="engine 0 is dead"):
            pool.mark_lost(pool.slots[0], DEAD, EngineLost("engine 0 is dead"))
        await PoolMemory(pool).enter(SAVE)
        supervisors: list[Any] = [slot.supervisor for slot in pool.slots]
        assert [supervisor.num_stops for supervisor in supervisors] == [1, 1]

    play(SlowSupervisor, HealthConfig(on_dead_engine="stop"), scene)


def test_a_checkpoint_is_attempted_even_if_the_actor_of_an_engine_hangs() -> None:
    class SilentActor(SlowSupervisor):
        """Supervisor of which engine 0 has an actor that does not respond."""

        async def stop_server(self) -> None:
            if self._name == "engine 0":
                raise DeadlineExceeded("engine 0 did not stop")
            await asyncio.sleep(0)
            await super().stop_server()

    async def scene(pool: EnginePool, engines: list[Any]) -> None:
        for index in range(2):
            record(pool, index)
        memory, supervisors = PoolMemory(pool), [slot.supervisor for slot in pool.slots]
        with pytest.raises(DeadlineExceeded, match="engine 0 did not stop"):
            await memory._stop(pool.slots)
        assert cast(Any, supervisors[1]).num_stops == 1
        with pytest.raises(EngineLost, match="engine 1 is dead"):
            pool.mark_lost(pool.slots[1], DEAD, EngineLost("engine 1 is dead"))
        await memory.enter(SAVE)
        assert cast(Any, supervisors[1]).num_stops == 2
        assert "engine 0 did not stop: it may keep device memory" in " ".join(pool.drain_messages())

    play(SilentActor, HealthConfig(on_dead_engine="stop"), scene)


def test_an_engine_that_its_actor_does_not_stop_is_reported() -> None:
    class FailingActor(SlowSupervisor):
        """Supervisor whose actor raises instead of stopping the engine."""

        async def stop_server(self) -> None:
            raise EngineError(f"the actor of {self._name}: OSError: no such folder")

    async def scene(pool: EnginePool, engines: list[Any]) -> None:
        for index in range(2):
            record(pool, index)
        await PoolMemory(pool)._stop(pool.slots)
        assert pool.drain_messages() == tuple(
            f"engine {index} may keep device memory, because it was not stopped: the actor of engine {index}: OSError: no "
            "such folder"
            for index in range(2)
        )

    play(FailingActor, HealthConfig(), scene)


def test_a_phase_does_not_wait_for_restarts_that_an_earlier_phase_defers() -> None:
    async def scene(pool: EnginePool, engines: list[Any]) -> None:
        for index in range(2):
            record(pool, index)
        memory = PoolMemory(pool)
        await memory.enter(STEP)
        pool.mark_lost(pool.slots[0], DEAD, EngineLost("engine 0 is dead"))
        await memory.enter(SAVE)
        assert pool.slots[0].is_restarting
        await memory.enter(COLLECT)
        await let_run()
        assert not pool.slots[0].is_restarting

    play(SlowSupervisor, HealthConfig(), scene)


def test_a_step_also_waits_for_an_engine_that_is_lost_during_the_wait() -> None:
    class Slow(SlowSupervisor):
        """Supervisor whose restart waits until the test sets an event."""

        async def restart(self) -> Any:
            await asyncio.sleep(0)
            await starts[self._name].wait()
            return await super().restart()

    starts = {f"engine {index}": asyncio.Event() for index in range(2)}

    async def scene(pool: EnginePool, engines: list[Any]) -> None:
        for index in range(2):
            record(pool, index)
        pool.mark_lost(pool.slots[0], DEAD, EngineLost("engine 0 is dead"))
        await let_run()
        memory = PoolMemory(pool)
        wait = asyncio.ensure_future(memory._wait_for_restarts())
        await let_run()
        pool.mark_lost(pool.slots[1], DEAD, EngineLost("engine 1 is dead"))
        starts["engine 0"].set()
        await let_run()
        assert not pool.slots[0].is_restarting and not wait.done(), "engine 1 is starting"
        starts["engine 1"].set()
        await wait
        assert not pool.slots[1].is_restarting

    play(Slow, HealthConfig(), scene)


def test_a_step_waits_for_engines_that_are_starting(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scene(pool: EnginePool, engines: list[Any]) -> None:
        client, _ = record(pool, 1)
        pool.mark_lost(pool.slots[0], DEAD, EngineLost("engine 0 is dead"))
        wait = PoolMemory._wait_for_restarts

        async def wait_and_record(memory: PoolMemory) -> None:
            await wait(memory)
            assert not pool.slots[0].is_restarting
            record(pool, 0)

        monkeypatch.setattr(PoolMemory, "_wait_for_restarts", wait_and_record)
        await PoolMemory(pool).enter(STEP)
        assert pool.slots[0].client.released == set(ENGINE_PARTS) == client.released

    play(SlowSupervisor, HealthConfig(), scene)
