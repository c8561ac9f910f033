"""``run.deterministic=true`` on a CPU: engine and trainer agree in every bit, however the engine came to a token."""

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
from tests.engine.conftest import Engine, Models, prompt, sampled, start
from tests.engine.exact_scores import Question
from tests.train.jobs import run_forked
from tests.train.ranks import run_ranks

pytestmark = [pytest.mark.engine, pytest.mark.ranks]
TEMPERATURES = (1.0, 0.7)
LENGTHS = (1, 2, 3, 4, 7, 18, 63, 64, 65, 120)


@pytest.fixture(scope="module")
def exact_engine(models: Models, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    yield from start(models, tmp_path_factory.mktemp("exact"), 1, deterministic=True)


@dataclass(frozen=True, slots=True)
class Told:
    """Scores by the engine for one model and temperature: the same sequences, computed in different ways."""

    question: Question
    sampled: list[tuple[int, F32]]  # per sequence: where its response starts, and the response's log-probabilities
    prefilled: list[F32]  # [L - 1] of whole sequences in one prefill
    alone: list[Completion]  # the first sequences again, each alone in the engine
    continued: list[tuple[I32, F32]]  # tokens after a cached prefix, and their log-probabilities


async def forget(engine: Engine) -> None:
    """Drop all cached prefixes; paused, since the engine refuses while it still winds up the last reply."""
    await engine.client.pause()
    await engine.client.flush()
    await engine.client.resume()


async def ask(engine: Engine, models: Models, name: str, temperature: float) -> Told:
    """Sample everything in one batch, then some of it alone, after a cached prefix, and all of it by prefill."""
    prompts, seeds = [prompt(length, seed=length) for length in LENGTHS], [11, 12]
    sampling = sampled(temperature, tokens=20)
    groups = await asyncio.gather(*(engine.client.generate(ids, seeds, sampling) for ids in prompts))
    pairs = [(ids, completion) for ids, group in zip(prompts, groups, strict=True) for completion in group]
    sequences = tuple(np.concatenate([ids, completion.token_ids]) for ids, completion in pairs)
    tails = [min(8, len(completion.token_ids)) for _, completion in pairs]  # a response may end earlier
    continued = [
        await engine.client.generate(sequences[i][: -tails[i]], [seeds[i % 2]], sampled(temperature, tokens=tails[i]))
        for i in range(0, len(sequences), 5)
    ]
    await forget(engine)
    alone = [(await engine.client.generate(ids, [seeds[0]], sampling))[0] for ids in prompts[:4]]
    await forget(engine)
    return Told(
        Question(models.paths[name], temperature, sequences),
        [(len(ids), completion.logprobs) for ids, completion in pairs],
        await engine.client.score(sequences, temperature),
        alone,
        [(one.token_ids, one.logprobs) for (one,) in continued],
    )


@pytest.fixture(scope="module")
def told(exact_engine: Engine, models: Models) -> list[Told]:
    """Both models at both temperatures; the second one came by a push."""
    engine = exact_engine
    first = [engine.run(ask(engine, models, "A", temperature)) for temperature in TEMPERATURES]
    engine.run(engine.push(models.tensors("B"), 1))
    return [*first, *(engine.run(ask(engine, models, "B", temperature)) for temperature in TEMPERATURES)]


def test_prefill_decode_cached_prefixes_and_batches_give_the_same_bits(told: list[Told]) -> None:
    for said in told:
        for (begin, decoded), prefilled in zip(said.sampled, said.prefilled, strict=True):
            assert np.array_equal(decoded, prefilled[begin - 1 :])
        for i, one in enumerate(said.alone):
            assert np.array_equal(one.token_ids, said.question.sequences[2 * i][LENGTHS[i] :])
            assert np.array_equal(one.logprobs, said.sampled[2 * i][1])
        assert sum(len(token_ids) for token_ids, _ in said.continued) > 20
        for i, (token_ids, logprobs) in zip(range(0, len(said.sampled), 5), said.continued, strict=True):
            assert np.array_equal(token_ids, said.question.sequences[i][-len(token_ids) :])
            assert np.array_equal(logprobs, said.sampled[i][1][-len(token_ids) :])


def test_the_trainer_has_the_engines_bits(told: list[Told]) -> None:
    (answers,) = run_ranks("tests.engine.exact_scores:answer", 1, Layout(), [said.question for said in told])
    tokens = 0
    for said, columns in zip(told, answers, strict=True):
        for mine, engines in zip(columns, said.prefilled, strict=True):
            assert np.array_equal(mine, engines), f"largest difference {np.abs(mine - engines).max()}"
            tokens += len(mine)
    assert tokens > 2_000


def test_pipeline_and_data_parallel_ranks_keep_the_bits(told: list[Told]) -> None:
    found = run_forked("tests.engine.exact_scores:both_layouts", 2, told[-1].question)
    columns = [column for rank in found for column in rank]
    assert len(columns) == 2
    for column in columns:
        for mine, engines in zip(column, told[-1].prefilled, strict=True):
            assert np.array_equal(mine, engines)


def test_one_bit_of_one_weight_would_show(exact_engine: Engine, models: Models, told: list[Told]) -> None:
    """The planted fault: a push in which one element is off by one unit in the last place."""
    engine = exact_engine
    tensors = models.tensors("B")
    nudged = tensors["model.norm.weight"].clone()
    nudged[0] = torch.nextafter(nudged[0], torch.tensor(2.0))
    assert int((nudged != tensors["model.norm.weight"]).sum()) == 1
    engine.run(engine.push(tensors | {"model.norm.weight": nudged}, 2))
    found = engine.run(engine.client.score(told[-1].question.sequences, TEMPERATURES[-1]))
    pairs = list(zip(found, told[-1].prefilled, strict=True))
    assert not all(np.array_equal(mine, right) for mine, right in pairs)
    assert max(np.abs(mine - right).max() for mine, right in pairs) < 1e-5
