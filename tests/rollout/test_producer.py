"""Rollout producer: it runs ahead by the maximum staleness and reports failures."""

import asyncio

import pytest

from slime_like.errors import SlimeLikeError
from slime_like.rollout.collect.collector import RolloutProducer
from slime_like.rollout.collect.state import GeneratedRollout


def produced(rollout_id: int) -> GeneratedRollout:
    return GeneratedRollout(rollout_id, (), 0.0, 1.0)


def recording(ids: list[int], gate: asyncio.Event | None = None):
    async def generate(rollout_id: int) -> GeneratedRollout:
        ids.append(rollout_id)
        if gate is not None and rollout_id > 0:
            await gate.wait()
        return produced(rollout_id)

    return generate


async def run_pending_tasks() -> None:
    """Let every task run until it waits."""
    for _ in range(20):
        await asyncio.sleep(0)


@pytest.mark.parametrize(("staleness", "ahead"), [(0, [0]), (1, [0, 1]), (2, [0, 1, 2])])
def test_production_runs_ahead_by_the_staleness(staleness: int, ahead: list[int]) -> None:
    async def scenario() -> list[int]:
        ids: list[int] = []
        producer = RolloutProducer(recording(ids), first=0, last=10, max_staleness=staleness)
        assert (await producer.get(0)).rollout_id == 0
        await run_pending_tasks()
        await producer.stop()
        return ids

    assert asyncio.run(scenario()) == ahead


def test_the_last_rollout_ends_production() -> None:
    async def scenario() -> list[int]:
        ids: list[int] = []
        producer = RolloutProducer(recording(ids), first=3, last=5, max_staleness=4)
        for rollout_id in (3, 4):
            assert (await producer.get(rollout_id)).rollout_id == rollout_id
            producer.forget(rollout_id)
        await run_pending_tasks()
        await producer.stop()
        return ids

    assert asyncio.run(scenario()) == [3, 4]


def test_a_failure_is_raised_to_the_waiting_caller() -> None:
    async def generate(rollout_id: int) -> GeneratedRollout:
        if rollout_id == 1:
            raise ValueError("engine gone")
        return produced(rollout_id)

    async def scenario() -> None:
        producer = RolloutProducer(generate, first=0, last=3, max_staleness=1)
        await producer.get(0)
        for rollout_id in (1, 2):  # rollouts after a failure fail too, instead of waiting forever
            with pytest.raises(ValueError, match="engine gone"):
                await producer.get(rollout_id)
        await producer.stop()

    asyncio.run(scenario())


@pytest.mark.parametrize(("ending", "error"), [("failure", "engine gone"), ("stop", "rollout 1 .* was stopped")])
def test_a_wait_for_a_later_rollout_ends_with_a_failure_and_with_stop(ending: str, error: str) -> None:
    gate = asyncio.Event()

    async def generate(rollout_id: int) -> GeneratedRollout:
        await gate.wait()
        raise SlimeLikeError("engine gone")

    async def scenario() -> None:
        producer = RolloutProducer(generate, first=0, last=3, max_staleness=1)
        later, idle = asyncio.create_task(producer.get(1)), asyncio.create_task(producer.wait_until_idle())
        await run_pending_tasks()
        assert not later.done() and not idle.done()
        if ending == "failure":
            gate.set()
        else:
            await producer.stop()
        with pytest.raises(SlimeLikeError, match=error):
            await asyncio.wait_for(later, 5)
        await asyncio.wait_for(idle, 5)
        await producer.stop()

    asyncio.run(scenario())


def test_a_rollout_that_is_not_generated_is_refused() -> None:
    async def scenario() -> None:
        producer = RolloutProducer(recording([]), first=3, last=6, max_staleness=0)
        await producer.get(3)
        await producer.get(3)
        producer.forget(3)
        for rollout_id in (2, 3, 6):
            with pytest.raises(ValueError, match=f"rollout {rollout_id} is not generated"):
                await asyncio.wait_for(producer.get(rollout_id), 5)
        assert (await producer.get(4)).rollout_id == 4
        await producer.stop()

    asyncio.run(scenario())


def test_a_stopped_producer_generates_nothing() -> None:
    async def scenario() -> None:
        calls: list[int] = []
        producer = RolloutProducer(recording(calls), first=0, last=3, max_staleness=1)
        await producer.stop()
        with pytest.raises(SlimeLikeError, match="rollout 0 is not generated: the rollout producer was stopped"):
            await asyncio.wait_for(producer.get(0), 5)
        assert not calls

    asyncio.run(scenario())


def test_a_generation_that_cancels_itself_fails() -> None:
    async def generate(rollout_id: int) -> GeneratedRollout:
        raise asyncio.CancelledError

    async def scenario() -> None:
        producer = RolloutProducer(generate, first=0, last=3, max_staleness=1)
        for rollout_id in (0, 1):
            with pytest.raises(SlimeLikeError, match=r"rollout 0: rollout\.generate raised CancelledError"):
                await asyncio.wait_for(producer.get(rollout_id), 5)
        await producer.stop()

    asyncio.run(scenario())


def test_stop_cancels_rollouts_in_flight() -> None:
    async def scenario() -> int:
        gate = asyncio.Event()
        ids: list[int] = []
        producer = RolloutProducer(recording(ids, gate), first=0, last=3, max_staleness=1)
        await producer.get(0)
        await run_pending_tasks()
        assert ids == [0, 1]
        await producer.stop()
        return len([task for task in asyncio.all_tasks() if task is not asyncio.current_task()])

    assert asyncio.run(scenario()) == 0


def test_wait_until_idle_waits_for_admitted_rollouts_and_restore_continues_after_them() -> None:
    async def scenario() -> tuple[list[int], list[int], list[int]]:
        gate = asyncio.Event()
        ids: list[int] = []
        producer = RolloutProducer(recording(ids, gate), first=0, last=9, max_staleness=2)
        await producer.get(0)
        producer.forget(0)
        idle = asyncio.create_task(producer.wait_until_idle())
        await run_pending_tasks()
        assert not idle.done()
        gate.set()
        await idle
        completed_rollouts = producer.completed_rollouts()
        await producer.stop()

        resumed_ids: list[int] = []
        resumed_producer = RolloutProducer(recording(resumed_ids), first=1, last=9, max_staleness=2)
        resumed_producer.restore(completed_rollouts)
        assert await resumed_producer.get(1) is completed_rollouts[0]
        await run_pending_tasks()
        await resumed_producer.stop()
        return ids, [rollout.rollout_id for rollout in completed_rollouts], resumed_ids

    assert asyncio.run(scenario()) == ([0, 1, 2], [1, 2], [3])


def test_a_failed_rollout_does_not_prevent_a_save_of_the_completed_ones() -> None:
    """A checkpoint of the trained step is written first; the error is raised when the failed rollout is requested."""

    async def generate(rollout_id: int) -> GeneratedRollout:
        if rollout_id == 2:
            raise ValueError("engine gone")
        return produced(rollout_id)

    async def scenario() -> list[int]:
        producer = RolloutProducer(generate, first=0, last=9, max_staleness=2)
        await producer.get(0)
        producer.forget(0)
        await producer.wait_until_idle()
        completed = producer.completed_rollouts()
        with pytest.raises(ValueError, match="engine gone"):
            await producer.get(2)
        await producer.stop()
        return [generated.rollout_id for generated in completed]

    assert asyncio.run(scenario()) == [1]


def test_wait_until_idle_returns_after_a_failure() -> None:
    async def generate(rollout_id: int) -> GeneratedRollout:
        raise ValueError("engine gone")

    async def scenario() -> None:
        producer = RolloutProducer(generate, first=0, last=3, max_staleness=1)
        with pytest.raises(ValueError, match="engine gone"):
            await producer.get(0)
        await producer.wait_until_idle()
        await producer.stop()

    asyncio.run(scenario())
