"""Interrupted answers on a real engine: what is continued is whole, and each token is scored by the weights it came from."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest

from slime_like.config.schema.faults import HealthConfig
from slime_like.data.dump import load_groups, save_groups
from slime_like.interfaces import Completion
from slime_like.metrics.types import reduce_metrics
from slime_like.rollout.collect.resumable import CallJournal, PauseGate, ResumableEngine
from slime_like.rollout.collect.state import PartialGroup, RolloutState
from slime_like.rollout.engine.client import EngineClient
from slime_like.rollout.pool.engine_pool import EnginePool
from slime_like.rollout.pool.router import Usage
from slime_like.types import Prompt
from slime_like.util.deadline import Deadline
from tests.engine.closeness import assert_close
from tests.engine.conftest import Engine, Models, prompt, sampled

pytestmark = pytest.mark.engine
IDS, SEEDS, TOKENS = prompt(40, seed=8), [11, 12, 13, 14], 120
TRIES = 20
LONG = sampled(tokens=TOKENS)


@pytest.fixture(autouse=True)
def weights_of_a(request: pytest.FixtureRequest) -> Iterator[None]:
    """Every test leaves the shared engine with the weights of A at version 0."""
    yield
    engine: Engine = request.getfixturevalue("engine")
    engine.run(engine.push(request.getfixturevalue("models").tensors("A"), 0))


class FixedEngine:
    """Supervisor of an engine that is never restarted."""

    def __init__(self, client: EngineClient) -> None:
        self.client = client

    async def restart(self) -> tuple[EngineClient, str]:
        raise AssertionError("restarted")

    async def stopped(self) -> tuple[int, ...]:
        return ()


class Group:
    """A lane of its own and what stops it."""

    def __init__(self, engine: Engine, journal: CallJournal | None = None) -> None:
        self.client, self.gate, self.usage = engine.client, PauseGate(), Usage(1)
        self.journal = journal or CallJournal()

    async def generate(self) -> Sequence[Completion]:
        pool = EnginePool([FixedEngine(self.client)], HealthConfig(), receives_pushes=False)
        with pool.router.lease(1) as lease:
            engine = ResumableEngine(pool, lease, self.journal, self.gate, self.usage)
            return await engine.generate(IDS, SEEDS, LONG)

    async def stop_after(self, tokens: int) -> None:
        """Stop when a request of ``tokens`` tokens, begun now, has ended: about as many are then sampled here."""
        await self.client.generate(prompt(3), [5], sampled(tokens=tokens))
        await self.stop()

    async def interrupted(self, *stops: int) -> asyncio.Task[Sequence[Completion]]:
        """An answer that was stopped so often, and went on between. On a busy machine one may end, or not have begun, when it is stopped: then another."""
        for _ in range(TRIES):
            self.journal = CallJournal()
            answer = asyncio.create_task(self.generate())
            for tokens in stops:
                self.gate.open()
                await self.stop_after(tokens)
            if not answer.done() and all(len(c.token_ids) for call in self.journal.copy() for c in call.completions):
                return answer
            self.gate.open()
            await answer
        raise AssertionError(f"{TRIES} answers of {TOKENS} tokens ended before they could be stopped")

    async def stop(self) -> None:
        await self.gate.shut(self.client.abort_all, Deadline("test", "stop", 30))


def same(found: Sequence[Completion], expected: Sequence[Completion]) -> None:
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_array_equal(one.token_ids, other.token_ids)
        assert_close(one.logprobs, other.logprobs)
        assert (one.versions, one.finish) == (other.versions, other.finish)


def test_a_continued_answer_has_the_versions_and_logprobs_of_its_parts(engine: Engine, models: Models) -> None:
    async def scenario() -> tuple[list[int], Sequence[Completion]]:
        group = Group(engine)
        answer = await group.interrupted(30)
        (call,) = group.journal.copy()
        await engine.push(models.tensors("B"), 7)
        group.gate.open()
        return [len(c.token_ids) for c in call.completions if c.finish == "abort"], await answer

    first, completions = engine.run(scenario())
    assert len(first) > 1 and all(0 < n < TOKENS for n in first)
    continued = [c for c in completions if len(c.versions) == 2]
    assert [c.versions for c in continued] == [
        ((0, n, 0), (n, len(c.token_ids), 7)) for n, c in zip(first, continued, strict=True)
    ]
    whole = [np.concatenate([IDS, c.token_ids]) for c in continued]
    rescored = engine.run(engine.client.score(whole, 1.0))  # by the engine, which now holds B
    for n, completion, ids, scores in zip(first, continued, whole, rescored, strict=True):
        old, new = (models.logprobs(name, ids, 1.0)[len(IDS) - 1 :] for name in "AB")
        assert_close(completion.logprobs[:n], old[:n])
        assert_close(completion.logprobs[n:], new[n:])
        assert_close(completion.logprobs[n:], scores[len(IDS) - 1 :][n:])
        assert np.abs(old - new).max() > 0.1  # or the above would say nothing


def test_under_the_same_weights_an_interruption_changes_nothing(engine: Engine, tmp_path: Path) -> None:
    async def scenario() -> tuple[Sequence[Completion], ...]:
        group, other = Group(engine), Group(engine)
        expected = await other.generate()
        bystander = asyncio.create_task(Group(engine).generate())  # an evaluation: aborted with the rest, it goes on
        score = asyncio.create_task(engine.client.score([prompt(60)] * 4, 1.0))
        answer = await group.interrupted(20, 20)
        saved = PartialGroup(3, Prompt(1, IDS, "", None, None), group.journal.copy())
        group.gate.open()
        save_groups(tmp_path / "g.npz", RolloutState({}, (), (saved,)).in_flight())
        (loaded,) = RolloutState.from_groups({}, load_groups(tmp_path / "g.npz")).partial_groups
        assert 0 < CallJournal(loaded.calls).num_tokens < TOKENS * len(SEEDS)
        resumed = await Group(engine, CallJournal(loaded.calls)).generate()  # in another process
        assert len((await score)[0]) == 59
        return expected, await answer, await bystander, resumed

    expected, *found = engine.run(scenario())
    for completions in found:
        same(completions, expected)


def test_an_answer_is_stopped_on_a_paused_engine(engine: Engine) -> None:
    async def scenario() -> tuple[Sequence[Completion], Sequence[Completion]]:
        group = Group(engine)
        expected = await Group(engine).generate()
        answer = asyncio.create_task(group.generate())
        await engine.client.generate(prompt(3), [5], sampled(tokens=60))
        await engine.client.pause()
        await group.stop()
        await engine.client.resume()
        group.gate.open()
        return expected, await answer

    expected, found = engine.run(scenario())
    same(found, expected)


def test_what_a_group_shares_is_counted_when_it_is_cached(engine: Engine) -> None:
    async def scenario() -> tuple[dict[str, float], dict[str, float]]:
        await engine.client.flush()
        group = Group(engine)
        await group.generate()
        first = reduce_metrics(group.usage.drain())
        again = Group(engine)
        await again.generate()
        return first, reduce_metrics(again.usage.drain())

    first, again = engine.run(scenario())
    assert first["rollout/prefix_cache_hit_rate"] < again["rollout/prefix_cache_hit_rate"]
    assert again["rollout/avg_cached_tokens_per_sample"] == len(IDS) - 1  # the last token's logits are computed anew
