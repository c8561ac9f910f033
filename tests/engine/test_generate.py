"""Answers of an engine, compared with transformers on the same weights."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest

from tests.engine.closeness import assert_close
from tests.engine.conftest import Engine, Models, prompt, sampled
from tests.engine.in_flight import TRIES

pytestmark = pytest.mark.engine


@pytest.mark.parametrize("temperature", [0.0, 0.7, 1.0])
def test_logprobs_are_those_of_the_distribution_sampled_from(
    engine: Engine, models: Models, temperature: float
) -> None:
    prompts = [prompt(length, seed=length) for length in (1, 3, 17, 40)]

    async def ask() -> list[list[np.ndarray]]:
        replies = [engine.client.generate(ids, [1, 2], sampled(temperature)) for ids in prompts]
        return [[c.token_ids, c.logprobs] for group in await asyncio.gather(*replies) for c in group]

    answers = engine.run(ask())
    for ids, (tokens, logprobs) in zip([p for p in prompts for _ in range(2)], answers, strict=True):
        expected = models.logprobs("A", np.concatenate([ids, tokens]), temperature or 1.0)[-len(tokens) :]
        assert_close(logprobs, expected)


def test_greedy_and_sampled_requests_in_one_batch_keep_their_own_distribution(engine: Engine, models: Models) -> None:
    ids = prompt(9)

    async def ask() -> tuple[Any, ...]:
        greedy = engine.client.generate(ids, [0, 1], sampled(0.0))
        return await asyncio.gather(greedy, engine.client.generate(ids, [5], sampled(0.7)))

    (first, second), (drawn,) = engine.run(ask())
    np.testing.assert_array_equal(first.token_ids, second.token_ids, "no seed counts at temperature 0")
    for completion, temperature in ((first, 1.0), (drawn, 0.7)):
        whole = np.concatenate([ids, completion.token_ids])
        expected = models.logprobs("A", whole, temperature)[-len(completion.token_ids) :]
        assert_close(completion.logprobs, expected)


def test_a_seed_decides_the_tokens_whatever_is_batched_with_it(engine: Engine) -> None:
    ids, seeds = prompt(7), list(range(100, 116))
    group = engine.run(engine.client.generate(ids, seeds, sampled()))
    alone = [engine.run(engine.client.generate(ids, [seed], sampled()))[0] for seed in seeds[::5]]
    for one, same in zip(alone, group[::5], strict=True):
        np.testing.assert_array_equal(one.token_ids, same.token_ids)
    assert len({tuple(c.token_ids.tolist()) for c in group}) == len(seeds)


def test_completions_carry_version_finish_and_length(engine: Engine) -> None:
    (completion,) = engine.run(engine.client.generate(prompt(5), [3], sampled(tokens=9)))
    assert completion.token_ids.dtype == np.int32
    assert completion.logprobs.dtype == np.float32
    assert len(completion.token_ids) == 9
    assert completion.finish == "length"
    assert completion.versions == ((0, 9, engine.run(engine.client.version())),)


def test_a_stop_token_ends_a_completion(engine: Engine) -> None:
    ids = prompt(5)
    (free,) = engine.run(engine.client.generate(ids, [3], sampled()))
    stop = int(free.token_ids[4])
    first = free.token_ids.tolist().index(stop)
    sampling = sampled()
    sampling = type(sampling)(sampling.temperature, sampling.max_new_tokens, stop_token_ids=(stop,))
    (stopped,) = engine.run(engine.client.generate(ids, [3], sampling))
    assert stopped.finish == "stop"
    np.testing.assert_array_equal(stopped.token_ids, free.token_ids[: first + 1])


def test_nucleus_and_top_k_draw_from_their_support(engine: Engine, models: Models) -> None:
    ids = prompt(6)
    sampling = type(sampled())(temperature=1.0, max_new_tokens=1, top_k=3)
    firsts = {int(c.token_ids[0]) for c in engine.run(engine.client.generate(ids, list(range(40)), sampling))}
    scores = [models.logprobs("A", np.append(ids, token).astype(np.int32), 1.0)[-1] for token in range(500)]
    assert firsts == set(np.argsort(scores)[-3:].tolist())


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_scores_of_given_tokens(engine: Engine, models: Models, temperature: float) -> None:
    sequences = [prompt(length, seed=length) for length in (2, 30, 64)]
    scored = engine.run(engine.client.score(sequences, temperature))
    for ids, logprobs in zip(sequences, scored, strict=True):
        assert_close(logprobs, models.logprobs("A", ids, temperature))


def test_scoring_leaves_sampling_of_the_same_batch_alone(engine: Engine, models: Models) -> None:
    ids = prompt(11)

    async def both() -> tuple[Any, ...]:
        return await asyncio.gather(
            engine.client.generate(ids, [8, 9], sampled(0.7)), engine.client.score([prompt(40, 4)] * 4, 0.5)
        )

    completions, _ = engine.run(both())
    for completion in completions:
        whole = np.concatenate([ids, completion.token_ids])
        expected = models.logprobs("A", whole, 0.7)[-len(completion.token_ids) :]
        assert_close(completion.logprobs, expected)


def test_abort_ends_a_request_with_the_tokens_it_has(engine: Engine) -> None:
    async def ask_and_abort() -> Any:
        request = asyncio.create_task(engine.client.generate(prompt(4), [1], sampled(tokens=240)))
        while not request.done():
            await engine.client.abort_all()
        (completion,) = await request
        return completion

    found = (engine.run(ask_and_abort()) for _ in range(TRIES))  # on a busy machine one may end before it is aborted
    completion = next((completion for completion in found if completion.finish == "abort"), None)
    assert completion is not None
    assert len(completion.token_ids) < 240
