"""Engines with FlowMLA return the results of engines without it, over pushes by every path.

Both engines have two data-parallel attention ranks. Results of requests that are sent one at a time are bitwise equal,
although the rank without a request runs idle batches.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import signal
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from slime_like.cluster.plan.engine import engine_settings
from slime_like.config.schema.flow_mla import FlowOptions
from slime_like.config.schema.rank_memory import VARIABLE
from slime_like.errors import EngineError, EngineLost
from slime_like.planner.config_json import read_shape
from slime_like.planner.flow_mla import flow_slots, flow_weights
from slime_like.planner.host import host_pool, rank_weights
from slime_like.rollout.engine import processes
from tests.engine.conftest import Models, RunningEngine, launch, make_sampling, prompt
from tests.engine.forked_engines import ForkedEngineServer, start_fork_server
from tests.engine.in_flight import generate_over_two_pushes, logprobs_by_version
from tests.engine.latent_models import build
from tests.engine.test_latent import CHUNK, TOLERANCE, assert_agrees, push

pytestmark = pytest.mark.engine
RANK_MEMORY = 1 << 25  # bytes, by which SGLang sizes the KV cache
OPTIONS = {
    "deepseek_v3": FlowOptions(("o_proj", "q_proj", "kv_b_proj", "a_proj")),
    "qwen3": FlowOptions(("o_proj", "qkv_proj"), transport="p2p"),
}


@dataclass(frozen=True)
class EngineArms:
    """Two engines of one model: with full weights on each rank, and with FlowMLA."""

    models: Models
    plain: RunningEngine
    flow: RunningEngine


@pytest.fixture(scope="module", params=OPTIONS)
def pair(
    request: pytest.FixtureRequest, models: Models, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[EngineArms]:
    """Return the engines of one family; they start at the same time."""
    start_fork_server()
    if request.param == "deepseek_v3":
        models = build(tmp_path_factory.mktemp("model"), "deepseek_v3")
    settings: dict[str, Any] = {
        "chunked_prefill_size": CHUNK,
        "server_type": ForkedEngineServer,
        "dp_attention": 2,
        "deterministic": request.param == "qwen3",
        "ep_size": 2 if request.param == "deepseek_v3" else 1,
        "max_total_tokens": None,
    }
    with contextlib.ExitStack() as stack:
        stack.enter_context(pytest.MonkeyPatch.context()).setenv(VARIABLE, str(RANK_MEMORY))
        runs: list[Any] = []
        for flow_mla in ("", OPTIONS[request.param].to_json()):
            run = launch(models, tmp_path_factory.mktemp("run"), 2, flow_mla=flow_mla, **settings)
            runs.append(stack.enter_context(contextlib.closing(run)))
            assert next(run) is None
        yield EngineArms(models, *(next(run) for run in runs))


def log_text(engine: RunningEngine) -> str:
    """Return the engine's log."""
    return Path(engine.server._spec.log_path).read_text()  # pyright: ignore[reportPrivateUsage]


def answers(engine: RunningEngine, models: Models, name: str) -> list[Any]:
    """Return tokens, logprobs and scores of single requests; assert that completions agree with transformers."""
    results: list[Any] = []
    for index, length in enumerate((1, 60)):
        ids, temperature = prompt(length, seed=5 + index), 0.8 * index
        (completion,) = engine.run(engine.client.generate(ids, [index], make_sampling(temperature, 8)))
        assert_agrees(models, name, ids, completion, temperature)
        results += [completion.token_ids, completion.logprobs]
    return [*results, *engine.run(engine.client.score([prompt(31, seed=7)], 0.7))]


async def update_from_disk(engine: RunningEngine, folder: Path) -> None:
    """Let the engine load a checkpoint."""
    request = {"model_path": str(folder), "flush_cache": True}
    await engine.client._connection.post("update", "/update_weights_from_disk", request)  # pyright: ignore[reportPrivateUsage]


def test_results_are_those_of_an_engine_that_holds_all_weights(pair: EngineArms) -> None:
    """Compare at the start, after pushes over shared memory and a process group, and after a load from disk."""
    for version, name in enumerate("ABAB"):
        results: list[list[Any]] = []
        for engine in (pair.plain, pair.flow):
            if version in (1, 2):
                engine.run(push(engine, pair.models.tensors(name), version))
            elif version == 3:
                engine.run(update_from_disk(engine, pair.models.paths[name]))
            results.append(answers(engine, pair.models, name))
        for plain, sharded in zip(*results, strict=True):
            np.testing.assert_array_equal(plain, sharded)


def test_a_repeated_request_has_the_same_bits(pair: EngineArms) -> None:
    """The padding tokens of an idle rank's batch enter the expert GEMMs, so they have to be the same each time."""
    engine = pair.plain
    repetitions: list[Any] = []
    for _ in range(6):  # each of the two ranks receives every other request
        engine.run(engine.drop_prefixes())
        (completion,) = engine.run(engine.client.generate(prompt(1, seed=3), [0], make_sampling(0.0, 8)))
        repetitions.append(completion.logprobs)
    for logprobs in repetitions[1:]:
        np.testing.assert_array_equal(logprobs, repetitions[0])


def test_requests_that_arrive_together(pair: EngineArms) -> None:
    """Send prompts of several lengths, so that ranks prefill, decode and idle at the same time."""
    engine, prompts = pair.flow, [prompt(length, seed=length) for length in (100, 60, 1, 17, 31)]
    engine.run(engine.push(pair.models.tensors("B"), 10))

    async def generate() -> list[Any]:
        requests = [
            engine.client.generate(ids, [index], make_sampling(0.0, 4 + 5 * index)) for index, ids in enumerate(prompts)
        ]
        return await asyncio.gather(*requests)

    for ids, (completion,) in zip(prompts, engine.run(generate()), strict=True):
        assert_agrees(pair.models, "B", ids, completion, 0.0)


def test_a_partial_update_is_refused(pair: EngineArms) -> None:
    """The commit names a missing projection, although later layers have overwritten its slot; a complete push succeeds.

    Each rank holds a part of the projection.
    """
    engine, tensors = pair.flow, pair.models.tensors("A")
    is_latent = "model.layers.0.self_attn.kv_b_proj.weight" in tensors
    copies = {"o_proj": 1, **({"kv_b_proj": 2} if is_latent else {"k_proj": 1})}  # kv_b_proj: and w_kc, w_vc
    for version, (projection, count) in enumerate(copies.items()):
        name = f"model.layers.0.self_attn.{projection}.weight"
        with pytest.raises(EngineError, match=r"layers\.0\.self_attn") as error:
            engine.run(engine.push({key: tensor for key, tensor in tensors.items() if key != name}, 11 + version))
        text = str(error.value)
        unwritten = re.findall(r"(\S+) \((\d+) of \d+ elements\)", text)
        assert {item.rpartition(".self_attn")[0] for item, _ in unwritten} == {"model.layers.0"}, text
        assert sum(int(elements) for _, elements in unwritten) == count * tensors[name].numel(), text
    engine.run(engine.push(tensors, 14))  # weights of A have even versions in the tests of this file
    answers(engine, pair.models, "A")


def test_requests_continue_under_new_weights_and_after_an_abort(pair: EngineArms) -> None:
    """Requests continue over two pushes, with both ranks decoding or the first rank idle.

    Afterwards, requests on both ranks are aborted and continued from their tokens.
    """
    engine, models, ids = pair.flow, pair.models, prompt(21, seed=3)
    for dp_rank in (None, 1):
        for completion in generate_over_two_pushes(engine, models, ids, 120, dp_rank, tokens_after_pushes=8):
            expected = logprobs_by_version(models, ids, completion)
            np.testing.assert_allclose(completion.logprobs, expected, rtol=0, atol=TOLERANCE)

    async def abort() -> list[Any]:
        request = asyncio.create_task(engine.client.generate(ids, [1, 2], make_sampling(tokens=400)))
        await engine.client.generate(prompt(5), [9], make_sampling(tokens=8))  # by then both usually have tokens
        await engine.client.abort_all()
        return await request

    for partial in engine.run(abort()):
        assert 0 < len(partial.token_ids) < 400
        assert_agrees(models, "A", ids, partial, 1.0)
        longer = np.concatenate([ids, partial.token_ids]).astype(np.int32)
        (continuation,) = engine.run(engine.client.generate(longer, [0], make_sampling(0.0)))
        assert_agrees(models, "A", longer, continuation, 0.0)


def test_a_rank_holds_the_bytes_of_the_formula(pair: EngineArms) -> None:
    """A rank counts the planner's bytes: ``W / 2 + 2 W / L`` for ``L`` layers, ``W / 2 + W / L`` while loading."""
    text, spec = log_text(pair.flow), pair.flow.server._spec  # pyright: ignore[reportPrivateUsage]
    shape, settings = read_shape("model.hf_checkpoint", spec.model_path), engine_settings(spec)
    full, slots = (round(4 * count(shape, settings)) for count in (flow_weights, flow_slots))
    line = f"{full // 2 + slots} bytes of each rank instead of {full} ({full // 2} private, {slots} in 2 slots)"
    line += f", at most {full // 2 + slots // 2} while loading"
    assert text.count(line) == 2, re.findall(r"slime_like FlowMLA .*", text)
    assert slots == 2 * full // len(shape.layers)
    bytes_without, bytes_with = (rank_weights(shape, s) for s in (replace(settings, flow_mla=()), settings))
    assert bytes_without - bytes_with == full // 2 - slots
    assert "module by module" in text, "the fused forward would read packed copies of the weights"
    assert "slime_like FlowMLA" not in log_text(pair.plain)


def test_the_kv_cache_has_the_bytes_that_the_weights_leave(pair: EngineArms) -> None:
    """SGLang, which reads the weights in memory, and the planner, which reads config.json, size the same cache."""
    num_tokens: list[int] = []
    planned_tokens: list[int] = []
    for engine in (pair.plain, pair.flow):
        spec = engine.server._spec  # pyright: ignore[reportPrivateUsage]
        shape, settings = read_shape("model.hf_checkpoint", spec.model_path), engine_settings(spec)
        planned_tokens.append(host_pool(shape, replace(settings, rank_memory=RANK_MEMORY), 0).tokens)
        (tokens,) = {int(text) for text in re.findall(r"max_total_num_tokens=(\d+)", log_text(engine))}
        assert tokens == pytest.approx(planned_tokens[-1], rel=0.01)
        num_tokens.append(tokens)
    # These models have few layers, so the slots take as much memory as the parts save, or more.
    assert num_tokens[1] - num_tokens[0] == pytest.approx(planned_tokens[1] - planned_tokens[0], abs=2)


def test_an_engine_ends_if_one_of_its_ranks_is_killed(pair: EngineArms) -> None:
    """The other rank would wait for the parts of the killed one. The engine is lost, so this test runs last."""
    engine = pair.flow
    *_, last_rank = processes.pids_of_part(engine.server.pid, "scheduler")

    async def generate() -> None:
        request = asyncio.create_task(engine.client.generate(prompt(9), [0, 1], make_sampling(tokens=400)))
        await engine.client.generate(prompt(5), [9], make_sampling(tokens=8))
        os.kill(last_rank, signal.SIGKILL)
        await request

    with pytest.raises(EngineLost):
        engine.run(generate())
    assert "is alive" not in engine.server.cause_of_death()
