"""Interrupted completions on a real engine are continued, and each token has the logprob of its weight version."""

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
from slime_like.rollout.collect.journal import CallJournal
from slime_like.rollout.collect.sampler import PauseGate, ResumableEngine
from slime_like.rollout.collect.state import PartialGroup, RolloutState
from slime_like.rollout.pool.engine_pool import EnginePool
from slime_like.rollout.pool.router import RequestCounts
from slime_like.types import Prompt
from slime_like.util.deadline import Deadline
from tests.engine.closeness import assert_close
from tests.engine.conftest import Models, RunningEngine, make_sampling, prompt
from tests.engine.fixed_engine import FixedEngine

pytestmark = pytest.mark.engine
IDS, SEEDS, TOKENS = prompt(40, seed=8), [11, 12, 13, 14], 120
MAX_TRIES = 20
LONG_SAMPLING = make_sampling(tokens=TOKENS)


@pytest.fixture(autouse=True)
def weights_of_a(request: pytest.FixtureRequest) -> Iterator[None]:
    """Restore the weights of A at version 0 on the shared engine, after each test."""
    yield
    engine: RunningEngine = request.getfixturevalue("engine")
    engine.run(engine.push(request.getfixturevalue("models").tensors("A"), 0))


class GroupUnderTest:
    """Requests of one group, with the gate that interrupts them."""

    def __init__(self, engine: RunningEngine, journal: CallJournal | None = None) -> None:
        self.client, self.gate, self.usage = engine.client, PauseGate(), RequestCounts(1)
        self.journal = journal or CallJournal()

    async def generate(self) -> Sequence[Completion]:
        pool = EnginePool([FixedEngine(self.client)], HealthConfig(), receives_pushes=False)
        with pool.router.assign(1) as assignment:
            engine = ResumableEngine(pool, assignment, self.journal, self.gate, self.usage)
            return await engine.generate(IDS, SEEDS, LONG_SAMPLING)

    async def stop_after(self, tokens: int) -> None:
        """Stop once another request has sampled ``tokens`` tokens; this group has about as many by then."""
        await self.client.generate(prompt(3), [5], make_sampling(tokens=tokens))
        await self.stop()

    async def start_and_interrupt(self, *stops: int) -> asyncio.Task[Sequence[Completion]]:
        """Return the task of a completion that was interrupted after each of ``stops`` tokens and continued in between.

        On a busy machine a request may end before an interruption, or begin after it; the group is then started again.
        """
        for _ in range(MAX_TRIES):
            self.journal = CallJournal()
            answer = asyncio.create_task(self.generate())
            for tokens in stops:
                self.gate.open()
                await self.stop_after(tokens)
            if not answer.done() and all(len(c.token_ids) for call in self.journal.copy() for c in call.completions):
                return answer
            self.gate.open()
            await answer
        raise AssertionError(f"{MAX_TRIES} completions of {TOKENS} tokens ended before they could be interrupted")

    async def stop(self) -> None:
        await self.gate.shut(self.client.abort_all, Deadline("test", "stop", 30))


def assert_equal_completions(completions_of_groups: Sequence[Completion], expected: Sequence[Completion]) -> None:
    for completion, reference in zip(completions_of_groups, expected, strict=True):
        np.testing.assert_array_equal(completion.token_ids, reference.token_ids)
        assert_close(completion.logprobs, reference.logprobs)
        assert (completion.versions, completion.finish) == (reference.versions, reference.finish)


def test_a_continued_completion_has_the_versions_and_logprobs_of_its_parts(
    engine: RunningEngine, models: Models
) -> None:
    async def scenario() -> tuple[list[int], Sequence[Completion]]:
        group = GroupUnderTest(engine)
        answer = await group.start_and_interrupt(30)
        (call,) = group.journal.copy()
        await engine.push(models.tensors("B"), 7)
        group.gate.open()
        return [len(c.token_ids) for c in call.completions if c.finish == "abort"], await answer

    lengths, completions = engine.run(scenario())
    assert len(lengths) > 1 and all(0 < n < TOKENS for n in lengths)
    continued_completions = [c for c in completions if len(c.versions) == 2]
    assert [c.versions for c in continued_completions] == [
        ((0, n, 0), (n, len(c.token_ids), 7)) for n, c in zip(lengths, continued_completions, strict=True)
    ]
    sequences = [np.concatenate([IDS, c.token_ids]) for c in continued_completions]
    scores_of_sequences = engine.run(engine.client.score(sequences, 1.0))  # by the engine, whose weights are now B
    for n, completion, ids, scores in zip(lengths, continued_completions, sequences, scores_of_sequences, strict=True):
        logprobs_a, logprobs_b = (models.logprobs(name, ids, 1.0)[len(IDS) - 1 :] for name in "AB")
        assert_close(completion.logprobs[:n], logprobs_a[:n])
        assert_close(completion.logprobs[n:], logprobs_b[n:])
        assert_close(completion.logprobs[n:], scores[len(IDS) - 1 :][n:])
        assert np.abs(logprobs_a - logprobs_b).max() > 0.1  # so that the assertions above distinguish A from B


def test_an_interruption_under_the_same_weights_changes_no_token(engine: RunningEngine, tmp_path: Path) -> None:
    async def scenario() -> tuple[Sequence[Completion], ...]:
        group, reference = GroupUnderTest(engine), GroupUnderTest(engine)
        expected = await reference.generate()
        bystander = asyncio.create_task(
            GroupUnderTest(engine).generate()
        )  # like an evaluation: aborted with the others, then continued
        score = asyncio.create_task(engine.client.score([prompt(60)] * 4, 1.0))
        answer = await group.start_and_interrupt(20, 20)
        unfinished = PartialGroup(3, Prompt(1, IDS, "", None, None), group.journal.copy())
        group.gate.open()
        save_groups(tmp_path / "g.npz", RolloutState({}, (), (unfinished,)).in_flight())
        (restored,) = RolloutState.from_groups({}, load_groups(tmp_path / "g.npz")).partial_groups
        assert 0 < CallJournal(restored.calls).num_tokens < TOKENS * len(SEEDS)
        resumed_group = await GroupUnderTest(engine, CallJournal(restored.calls)).generate()  # in another process
        assert len((await score)[0]) == 59
        return expected, await answer, await bystander, resumed_group

    expected, *completions_of_groups = engine.run(scenario())
    for completions in completions_of_groups:
        assert_equal_completions(completions, expected)


def test_a_completion_on_a_paused_engine_can_be_interrupted(engine: RunningEngine) -> None:
    async def scenario() -> tuple[Sequence[Completion], Sequence[Completion]]:
        group = GroupUnderTest(engine)
        expected = await GroupUnderTest(engine).generate()
        answer = asyncio.create_task(group.generate())
        await engine.client.generate(prompt(3), [5], make_sampling(tokens=60))
        await engine.client.pause()
        await group.stop()
        await engine.client.resume()
        group.gate.open()
        return expected, await answer

    expected, completions = engine.run(scenario())
    assert_equal_completions(completions, expected)


def test_prefix_cache_hits_of_a_group_are_counted(engine: RunningEngine) -> None:
    async def scenario() -> tuple[dict[str, float], dict[str, float]]:
        await engine.drop_prefixes()
        group = GroupUnderTest(engine)
        await group.generate()
        first_metrics = reduce_metrics(group.usage.drain())
        second_group = GroupUnderTest(engine)
        await second_group.generate()
        return first_metrics, reduce_metrics(second_group.usage.drain())

    first_metrics, second_metrics = engine.run(scenario())
    assert first_metrics["rollout/prefix_cache_hit_rate"] < second_metrics["rollout/prefix_cache_hit_rate"]
    assert (
        second_metrics["rollout/avg_cached_tokens_per_sample"] == len(IDS) - 1
    )  # the last token's logits are always computed
