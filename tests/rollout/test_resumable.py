"""Resumable engine: the engine of a group dies between or during the group's calls."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable

import numpy as np

from slime_like.config.schema.faults import HealthConfig
from slime_like.interfaces import Sampling
from slime_like.rollout.collect.journal import CallJournal
from slime_like.rollout.collect.sampler import PauseGate, ResumableEngine
from slime_like.rollout.pool.engine_pool import EnginePool
from slime_like.rollout.pool.router import RequestCounts
from tests.rollout.slow_engine import SlowRequest, SlowSupervisor, token

PROMPT = np.arange(2, 6, dtype=np.int32)


class StubPool:
    """Pool of two engines; the first one gets the calls."""

    def __init__(self) -> None:
        self.supervisors = [SlowSupervisor(random.Random(0), version, f"engine {version}", 0) for version in range(2)]
        self.pool = EnginePool(self.supervisors, HealthConfig(), receives_pushes=True)  # pyright: ignore[reportArgumentType]
        self.journal = CallJournal()


def play(turns: Callable[[StubPool, ResumableEngine], Awaitable[None]]) -> StubPool:
    async def run() -> StubPool:
        group = StubPool()
        with group.pool.router.assign(100) as assignment:
            assert assignment.engine is group.supervisors[0].client
            await turns(group, ResumableEngine(group.pool, assignment, group.journal, PauseGate(), RequestCounts(2)))
        await group.pool.stop()
        for task in (task for supervisor in group.supervisors for task in supervisor.tasks):
            task.cancel()
        return group

    return asyncio.run(run())


def test_finished_calls_are_kept_and_others_move_to_another_engine() -> None:
    async def turns(group: StubPool, engine_client: ResumableEngine) -> None:
        (first,) = await engine_client.generate(PROMPT, [7], Sampling(1.0, 5))
        assert first.versions == ((0, 5, 0),)
        answers = [asyncio.create_task(engine_client.generate(PROMPT, [seed], Sampling(1.0, 9))) for seed in (8, 9)]
        while not (sampled := sum(len(r.spans) for r in group.supervisors[0].client._requests)):
            await asyncio.sleep(0)
        group.supervisors[0].client.die()
        for seed, answer in zip((8, 9), answers, strict=True):
            (completion,) = await answer
            assert completion.token_ids.tolist() == [token(seed, len(PROMPT) + i) for i in range(9)]
            assert completion.versions == ((0, 9, 1),)  # the tokens of the lost engine are lost
        assert sampled > 0
        assert [len(c.token_ids) for call in group.journal.copy() for c in call.completions] == [5, 9, 9]

    assert play(turns).pool.take_restart_counts()[1] == 1  # one group, although two requests were lost


def test_tokens_before_an_abort_are_kept() -> None:
    async def turns(group: StubPool, engine_client: ResumableEngine) -> None:
        answer = asyncio.create_task(engine_client.generate(PROMPT, [8, 9], Sampling(1.0, 60)))
        engine = group.supervisors[0].client
        while not all(len(r.spans) > 3 for r in engine._requests or [SlowRequest(0, 0, 0)]):
            await asyncio.sleep(0)
        await engine.abort_all()
        while any(len(c.token_ids) == 0 for c in group.journal.copy()[0].completions):
            await asyncio.sleep(0)
        before = [len(c.token_ids) for c in group.journal.copy()[0].completions]
        assert min(before) > 0
        engine.die()
        for seed, num_before, completion in zip((8, 9), before, await answer, strict=True):
            assert completion.token_ids.tolist() == [token(seed, len(PROMPT) + i) for i in range(60)]
            assert completion.versions == ((0, num_before, 0), (num_before, 60, 1))

    play(turns)


def test_scores_come_from_a_serving_engine() -> None:
    async def turns(group: StubPool, engine_client: ResumableEngine) -> None:
        group.supervisors[0].client.die()
        (scores,) = await engine_client.score([PROMPT], 1.0)
        assert scores.tolist() == PROMPT[1:].tolist()
        assert group.pool.router.engines == [group.supervisors[1].client]

    assert play(turns).pool.drain_messages()[0].startswith("engine 0 is dead and is restarted")
