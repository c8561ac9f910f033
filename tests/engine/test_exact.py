"""``run.deterministic=true`` on a CPU: engine and trainer agree in every bit, for every way to compute a token."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import pytest
import torch

from slime_like.config.schema.resolved import Layout
from slime_like.interfaces import Completion
from slime_like.types import F32, I32
from tests.engine.conftest import Models, RunningEngine, make_sampling, prompt, start
from tests.engine.exact_scores import ScoreQuery
from tests.engine.forked_engines import ForkedEngineServer
from tests.train.jobs import Results, run_forked

pytestmark = [pytest.mark.engine, pytest.mark.ranks]
TEMPERATURES = (1.0, 0.7)
LENGTHS = (1, 2, 3, 4, 7, 18, 63, 64, 65, 120)


@pytest.fixture(scope="module")
def exact_engine(models: Models, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningEngine]:
    yield from start(models, tmp_path_factory.mktemp("exact"), 1, deterministic=True, server_type=ForkedEngineServer)


@dataclass(frozen=True, slots=True)
class EngineScores:
    """An engine's scores of the same sequences, computed in different ways, for one model and temperature."""

    query: ScoreQuery
    sampled_logprobs: list[tuple[int, F32]]  # per sequence: start and log-probabilities of the response
    prefilled_logprobs: list[F32]  # [L - 1] of complete sequences, each in one prefill
    single_completions: list[Completion]  # the first sequences again, each the only request of the engine
    continuations: list[tuple[I32, F32]]  # tokens after a cached prefix, and their log-probabilities


async def score_in_every_way(engine: RunningEngine, models: Models, name: str, temperature: float) -> EngineScores:
    """Sample all prompts in one batch, then some alone and after a cached prefix, and score all by prefill."""
    prompts, seeds = [prompt(length, seed=length) for length in LENGTHS], [11, 12]
    sampling = make_sampling(temperature, tokens=20)
    groups = await asyncio.gather(*(engine.client.generate(ids, seeds, sampling) for ids in prompts))
    pairs = [(ids, completion) for ids, group in zip(prompts, groups, strict=True) for completion in group]
    sequences = tuple(np.concatenate([ids, completion.token_ids]) for ids, completion in pairs)
    tails = [min(8, len(completion.token_ids)) for _, completion in pairs]  # a response may end earlier
    continuations = [
        await engine.client.generate(
            sequences[i][: -tails[i]], [seeds[i % 2]], make_sampling(temperature, tokens=tails[i])
        )
        for i in range(0, len(sequences), 5)
    ]
    await engine.drop_prefixes()
    single_completions = [(await engine.client.generate(ids, [seeds[0]], sampling))[0] for ids in prompts[:4]]
    await engine.drop_prefixes()
    return EngineScores(
        ScoreQuery(models.paths[name], temperature, sequences),
        [(len(ids), completion.logprobs) for ids, completion in pairs],
        await engine.client.score(sequences, temperature),
        single_completions,
        [(single.token_ids, single.logprobs) for (single,) in continuations],
    )


@pytest.fixture(scope="module")
def engine_scores(exact_engine: RunningEngine, models: Models) -> list[EngineScores]:
    """Return the scores of both models at both temperatures; model B arrives by a push."""
    engine = exact_engine
    first = [engine.run(score_in_every_way(engine, models, "A", temperature)) for temperature in TEMPERATURES]
    engine.run(engine.push(models.tensors("B"), 1))
    return [*first, *(engine.run(score_in_every_way(engine, models, "B", temperature)) for temperature in TEMPERATURES)]


def test_prefill_decode_cached_prefixes_and_batches_give_the_same_bits(engine_scores: list[EngineScores]) -> None:
    for scores in engine_scores:
        for (response_start, logprobs), prefilled in zip(
            scores.sampled_logprobs, scores.prefilled_logprobs, strict=True
        ):
            assert np.array_equal(logprobs, prefilled[response_start - 1 :])
        for i, single in enumerate(scores.single_completions):
            assert np.array_equal(single.token_ids, scores.query.sequences[2 * i][LENGTHS[i] :])
            assert np.array_equal(single.logprobs, scores.sampled_logprobs[2 * i][1])
        assert sum(len(token_ids) for token_ids, _ in scores.continuations) > 20
        for i, (token_ids, logprobs) in zip(
            range(0, len(scores.sampled_logprobs), 5), scores.continuations, strict=True
        ):
            assert np.array_equal(token_ids, scores.query.sequences[i][-len(token_ids) :])
            assert np.array_equal(logprobs, scores.sampled_logprobs[i][1][-len(token_ids) :])


@pytest.fixture(scope="module")
def trainer_scores(engine_scores: list[EngineScores]) -> Results:
    """Return the answers of one rank to all queries, and of two ranks to the last."""
    queries = [scores.query for scores in engine_scores]
    return run_forked(
        {
            "one rank": ("tests.engine.exact_scores:answer", 1, Layout(), queries),
            "two ranks": ("tests.engine.exact_scores:both_layouts", 2, queries[-1]),
        }
    )


def test_the_trainers_logprobs_equal_the_engines_in_every_bit(
    engine_scores: list[EngineScores], trainer_scores: Results
) -> None:
    (answers,) = trainer_scores["one rank"]
    tokens = 0
    for scores, columns in zip(engine_scores, answers, strict=True):
        for trainer_logprobs, engine_logprobs in zip(columns, scores.prefilled_logprobs, strict=True):
            assert np.array_equal(trainer_logprobs, engine_logprobs), (
                f"largest difference {np.abs(trainer_logprobs - engine_logprobs).max()}"
            )
            tokens += len(trainer_logprobs)
    assert tokens > 2_000


def test_pipeline_and_data_parallel_ranks_keep_the_bits(
    engine_scores: list[EngineScores], trainer_scores: Results
) -> None:
    columns = [column for rank_answers in trainer_scores["two ranks"] for column in rank_answers]
    assert len(columns) == 2
    for column in columns:
        for trainer_logprobs, engine_logprobs in zip(column, engine_scores[-1].prefilled_logprobs, strict=True):
            assert np.array_equal(trainer_logprobs, engine_logprobs)


def test_a_change_of_one_bit_of_one_weight_is_detected(
    exact_engine: RunningEngine, models: Models, engine_scores: list[EngineScores]
) -> None:
    """The injected fault is a push in which one element differs by one unit in the last place."""
    engine = exact_engine
    tensors = models.tensors("B")
    nudged_weight = tensors["model.norm.weight"].clone()
    nudged_weight[0] = torch.nextafter(nudged_weight[0], torch.tensor(2.0))
    assert int((nudged_weight != tensors["model.norm.weight"]).sum()) == 1
    engine.run(engine.push(tensors | {"model.norm.weight": nudged_weight}, 2))
    perturbed_scores = engine.run(engine.client.score(engine_scores[-1].query.sequences, TEMPERATURES[-1]))
    pairs = list(zip(perturbed_scores, engine_scores[-1].prefilled_logprobs, strict=True))
    assert not all(np.array_equal(logprobs, unperturbed) for logprobs, unperturbed in pairs)
    assert max(np.abs(logprobs - unperturbed).max() for logprobs, unperturbed in pairs) < 1e-5
