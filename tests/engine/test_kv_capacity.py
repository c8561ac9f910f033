"""KV cache usage: exact counts, and admission by expected response lengths."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest

from slime_like.interfaces import Completion, Sampling
from slime_like.rollout.engine.connection import KvUsage
from slime_like.util.deadline import Deadline
from tests.engine.conftest import VOCAB, Models, RunningEngine, make_sampling, prompt, start
from tests.engine.forked_engines import ForkedEngineServer

pytestmark = pytest.mark.engine

CAPACITY, PROMPT, RESPONSE, REQUESTS = 4096, 16, 200, 96
WORST_CASE = CAPACITY // (PROMPT + RESPONSE)
LONG = make_sampling(tokens=RESPONSE)
SHORT = replace(LONG, stop_token_ids=tuple(range(0, VOCAB, 20)))  # 20 tokens on average


@pytest.fixture(scope="module")
def fixed_engine(models: Models, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningEngine]:
    yield from start(models, tmp_path_factory.mktemp("fixed"), 1, server_type=ForkedEngineServer)


@pytest.fixture(scope="module")
def auto_engine(models: Models, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningEngine]:
    folder = tmp_path_factory.mktemp("auto")
    yield from start(models, folder, 1, max_running_requests=None, server_type=ForkedEngineServer)


def rollout(engine: RunningEngine, sampling: Sampling, first: int = 0) -> tuple[list[Completion], KvUsage]:
    """Send all requests at once; return their completions and the usage of the KV cache."""

    async def sample() -> tuple[list[Completion], KvUsage]:
        await engine.drop_prefixes()
        await engine.client.kv_usage()
        seeds = range(first, first + REQUESTS)
        calls = [engine.client.generate(prompt(PROMPT, seed), [seed], sampling) for seed in seeds]
        replies = await asyncio.gather(*calls)
        return [completion for reply in replies for completion in reply], await engine.client.kv_usage()

    return engine.run(sample())


def test_auto_does_not_retract_where_a_fixed_concurrency_does_and_samples_the_same_tokens(
    fixed_engine: RunningEngine, auto_engine: RunningEngine
) -> None:
    fixed_rollout, fixed_usage = rollout(fixed_engine, LONG)
    auto_rollout, usage = rollout(auto_engine, LONG)
    assert fixed_usage.retractions > 0
    assert usage.retractions == 0
    assert fixed_usage.capacity_tokens == usage.capacity_tokens == CAPACITY
    assert usage.running_requests_max >= 0.9 * WORST_CASE, "the cache is used"
    assert usage.share > 0.8
    for fixed_sample, auto_sample in zip(fixed_rollout, auto_rollout, strict=True):
        np.testing.assert_array_equal(fixed_sample.token_ids, auto_sample.token_ids)


def test_auto_runs_more_requests_when_responses_turn_out_short(auto_engine: RunningEngine) -> None:
    most_running = 0
    for wave in range(6):
        _, usage = rollout(auto_engine, SHORT, first=1000 * (wave + 1))
        assert usage.retractions <= 1, "the estimate of lengths bounds retractions, it does not exclude them"
        most_running = max(most_running, usage.running_requests_max)
    assert most_running > 2 * WORST_CASE


def test_a_pause_is_not_a_retraction_and_a_report_resets_the_counts(auto_engine: RunningEngine) -> None:
    async def pause() -> tuple[KvUsage, KvUsage]:
        await auto_engine.client.kv_usage()
        running = asyncio.ensure_future(
            auto_engine.client.generate(prompt(8), list(range(8)), make_sampling(tokens=150))
        )
        deadline = Deadline("test", "requests that run", 60)
        while not (await auto_engine.client.kv_usage()).running_requests_max:
            deadline.remaining("8 requests")
        await auto_engine.client.pause()
        await auto_engine.client.resume()
        await running
        return await auto_engine.client.kv_usage(), await auto_engine.client.kv_usage()

    first, second = auto_engine.run(pause())
    assert first.running_requests_max == 8
    assert first.retractions == 0
    assert second == replace(second, used_tokens_max=0, running_requests_max=0, retractions=0)
    assert second.capacity_tokens == CAPACITY
