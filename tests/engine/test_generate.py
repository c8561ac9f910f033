"""Completions and scores of an engine equal those of transformers with the same weights."""

from __future__ import annotations

import asyncio
import importlib
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from slime_like.interfaces import Sampling
from slime_like.rollout.engine.client import COLUMNS
from slime_like.rollout.engine.connection import completions
from tests.engine.closeness import assert_close
from tests.engine.conftest import Models, RunningEngine, make_sampling, prompt
from tests.engine.in_flight import MAX_TRIES

recorded_engine: Any = importlib.import_module("benchmarks.recorded_engine")
pytestmark = pytest.mark.engine


@pytest.mark.parametrize("temperature", [0.0, 0.7, 1.0])
def test_logprobs_are_of_the_sampling_distribution(engine: RunningEngine, models: Models, temperature: float) -> None:
    prompts = [prompt(length, seed=length) for length in (1, 3, 17, 40)]

    async def ask() -> list[list[np.ndarray]]:
        replies = [engine.client.generate(ids, [1, 2], make_sampling(temperature)) for ids in prompts]
        return [[c.token_ids, c.logprobs] for group in await asyncio.gather(*replies) for c in group]

    answers = engine.run(ask())
    for ids, (tokens, logprobs) in zip([p for p in prompts for _ in range(2)], answers, strict=True):
        expected = models.logprobs("A", np.concatenate([ids, tokens]), temperature or 1.0)[-len(tokens) :]
        assert_close(logprobs, expected)


def test_greedy_and_sampled_requests_in_one_batch_keep_their_own_distribution(
    engine: RunningEngine, models: Models
) -> None:
    ids = prompt(9)

    async def ask() -> tuple[Any, ...]:
        greedy = engine.client.generate(ids, [0, 1], make_sampling(0.0))
        return await asyncio.gather(greedy, engine.client.generate(ids, [5], make_sampling(0.7)))

    (first, second), (seeded,) = engine.run(ask())
    np.testing.assert_array_equal(first.token_ids, second.token_ids, "temperature 0 ignores the seed")
    for completion, temperature in ((first, 1.0), (seeded, 0.7)):
        sequence = np.concatenate([ids, completion.token_ids])
        expected = models.logprobs("A", sequence, temperature)[-len(completion.token_ids) :]
        assert_close(completion.logprobs, expected)


def test_a_seed_determines_the_tokens_in_any_batch(engine: RunningEngine) -> None:
    ids, seeds = prompt(7), list(range(100, 116))
    group = engine.run(engine.client.generate(ids, seeds, make_sampling()))
    single_completions = [engine.run(engine.client.generate(ids, [seed], make_sampling()))[0] for seed in seeds[::5]]
    for single, batched in zip(single_completions, group[::5], strict=True):
        np.testing.assert_array_equal(single.token_ids, batched.token_ids)
    assert len({tuple(c.token_ids.tolist()) for c in group}) == len(seeds)


def test_completions_carry_version_finish_and_length(engine: RunningEngine) -> None:
    (completion,) = engine.run(engine.client.generate(prompt(5), [3], make_sampling(tokens=9)))
    assert completion.token_ids.dtype == np.int32
    assert completion.logprobs.dtype == np.float32
    assert len(completion.token_ids) == 9
    assert completion.finish == "length"
    assert completion.versions == ((0, 9, engine.run(engine.client.version())),)


@pytest.mark.parametrize("num_tokens", [0, 9, 120])
def test_columns_are_the_tokens_and_log_probabilities_of_lists(engine: RunningEngine, num_tokens: int) -> None:
    """The reply of a request for columns has no list with an entry per token, and the same values bit for bit."""
    sampling = {"temperature": 1.0, "max_new_tokens": num_tokens, "ignore_eos": True}
    request: dict[str, Any] = {"input_ids": [prompt(5), prompt(8)], "return_logprob": True}
    request["sampling_params"] = [{**sampling, "sampling_seed": seed} for seed in (3, 4)]
    lists = engine.run(engine.client._connection.post("generate", "/generate", request))
    columns = engine.run(engine.client._connection.post("generate", "/generate", request | COLUMNS))
    for item in columns:
        assert isinstance(item["output_ids"], str)
        assert "output_token_logprobs" not in item["meta_info"]
    for reply, has_columns in ((lists, False), (columns, True)):
        record = recorded_engine.item(num_tokens, 0, columns=has_columns)
        for own, real in ((record, reply[0]), (record["meta_info"], reply[0]["meta_info"])):
            assert set(own) ^ set(real) == set(), "the benchmark of the manager replays other fields"
    for a, b in zip(completions(lists, 2), completions(columns, 2), strict=True):
        assert len(b.token_ids) == num_tokens
        np.testing.assert_array_equal(a.token_ids, b.token_ids, strict=True)
        np.testing.assert_array_equal(a.logprobs, b.logprobs, strict=True)
        assert (a.versions, a.finish, a.prompt_tokens) == (b.versions, b.finish, b.prompt_tokens)


def test_a_stop_token_ends_a_completion(engine: RunningEngine) -> None:
    ids = prompt(5)
    (unstopped_completion,) = engine.run(engine.client.generate(ids, [3], make_sampling()))
    stop = int(unstopped_completion.token_ids[4])
    first = unstopped_completion.token_ids.tolist().index(stop)
    sampling = replace(make_sampling(), stop_token_ids=(stop,))
    (completion,) = engine.run(engine.client.generate(ids, [3], sampling))
    assert completion.finish == "stop"
    np.testing.assert_array_equal(completion.token_ids, unstopped_completion.token_ids[: first + 1])


def test_nucleus_and_top_k_draw_from_their_support(engine: RunningEngine, models: Models) -> None:
    ids = prompt(6)
    sampling = Sampling(temperature=1.0, max_new_tokens=1, top_k=3)
    firsts = {int(c.token_ids[0]) for c in engine.run(engine.client.generate(ids, list(range(40)), sampling))}
    scores = [models.logprobs("A", np.append(ids, token).astype(np.int32), 1.0)[-1] for token in range(500)]
    assert firsts == set(np.argsort(scores)[-3:].tolist())


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_scores_equal_those_of_transformers(engine: RunningEngine, models: Models, temperature: float) -> None:
    sequences = [prompt(length, seed=length) for length in (2, 30, 64)]
    scores = engine.run(engine.client.score(sequences, temperature))
    for ids, logprobs in zip(sequences, scores, strict=True):
        assert_close(logprobs, models.logprobs("A", ids, temperature))


def test_scoring_does_not_affect_sampling_in_the_same_batch(engine: RunningEngine, models: Models) -> None:
    ids = prompt(11)

    async def generate_and_score() -> tuple[Any, ...]:
        return await asyncio.gather(
            engine.client.generate(ids, [8, 9], make_sampling(0.7)), engine.client.score([prompt(40, 4)] * 4, 0.5)
        )

    completions, _ = engine.run(generate_and_score())
    for completion in completions:
        sequence = np.concatenate([ids, completion.token_ids])
        expected = models.logprobs("A", sequence, 0.7)[-len(completion.token_ids) :]
        assert_close(completion.logprobs, expected)


def test_an_aborted_request_returns_its_tokens_so_far(engine: RunningEngine) -> None:
    async def ask_and_abort() -> Any:
        request = asyncio.create_task(engine.client.generate(prompt(4), [1], make_sampling(tokens=240)))
        while not request.done():
            await engine.client.abort_all()
        (completion,) = await request
        return completion

    completions = (
        engine.run(ask_and_abort()) for _ in range(MAX_TRIES)
    )  # on a busy machine a request may end before the abort
    completion = next((completion for completion in completions if completion.finish == "abort"), None)
    assert completion is not None
    assert len(completion.token_ids) < 240
