"""Engines whose KV cache is spread over ranks return the tokens and log-probabilities of engines without DCP."""

from __future__ import annotations

import asyncio
import contextlib
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from slime_like.cluster.workers import trainer_worker
from slime_like.config.schema.resolved import TransportSpec
from slime_like.interfaces import Completion
from slime_like.rollout.engine.connection import KvUsage
from tests.engine.conftest import Models, RunningEngine, launch, make_sampling, prompt
from tests.engine.dcp_engines import (
    CASES,
    MODELS,
    PROMPTS,
    ROWS,
    SAME,
    STATES,
    TOKENS,
    UNSHARDED,
    EngineCase,
    ReferenceResponses,
    assert_same,
    build,
    greedy,
    reference,
    samples,
)
from tests.engine.forked_engines import ForkedEngineServer, start_fork_server
from tests.engine.in_flight import generate_over_two_pushes, logprobs_by_version
from tests.engine.test_weights import TensorSource

pytestmark = [pytest.mark.engine, pytest.mark.slow]


@dataclass(frozen=True)
class ModelEngines:
    """Running engines of a model by the name of their case, and the responses of the one without DCP."""

    models: Models
    unsharded: RunningEngine
    sharded: Mapping[str, RunningEngine]
    reference: ReferenceResponses


@pytest.fixture(scope="module")
def engines(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ModelEngines]:
    """Yield the engines of all cases of a model, which start concurrently from one process that has imported SGLang."""
    start_fork_server()
    model: str = request.param
    models = build(tmp_path_factory.mktemp(model), MODELS[model])
    cases = {model: UNSHARDED[model], **{name: case for name, case in CASES.items() if case.model == model}}
    with contextlib.ExitStack() as stack:
        launches: dict[str, Any] = {}
        for name, case in cases.items():
            settings: dict[str, Any] = {"dcp": case.dcp, "server_type": ForkedEngineServer, **case.settings}
            run = launch(models, tmp_path_factory.mktemp("logs"), case.tp, **settings)
            launches[name] = stack.enter_context(contextlib.closing(run))
            assert next(launches[name]) is None
        sharded = {name: next(run) for name, run in launches.items()}
        unsharded = sharded.pop(model)
        yield ModelEngines(models, unsharded, sharded, reference(unsharded, models))


def engines_of(*models: str) -> pytest.MarkDecorator:
    """Run a test with the engines of each model; pytest runs all tests with the same engines together."""
    return pytest.mark.parametrize("engines", models, indirect=True)


def abort(engine: RunningEngine) -> None:
    """Abort two requests that continue a prompt."""

    async def start_and_abort() -> list[Completion]:
        request = asyncio.create_task(engine.client.generate(PROMPTS[-2], [1, 2], make_sampling(tokens=180)))
        await engine.client.generate(prompt(5), [9], make_sampling(tokens=8))  # by then both usually have tokens
        await engine.client.abort_all()
        return await request

    lengths = [len(completion.token_ids) for completion in engine.run(start_and_abort())]
    assert all(0 < length < 180 for length in lengths), lengths


def push_by_process_group(engine: RunningEngine, models: Models, weights: str, version: int) -> None:
    """Push over the broadcast transport."""
    transport = TransportSpec(kind="broadcast", backend="gloo", max_bytes=1 << 20, deadline_s=60)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(trainer_worker, "_own_address", lambda: "127.0.0.1")
        sender = trainer_worker._make_sender([engine.client], transport, "dcp")
    engine.run(engine.update(sender.send(TensorSource(models.tensors(weights))), version))
    engine.run(sender.close())


def log_of(engine: RunningEngine) -> str:
    return Path(f"/proc/{engine.server.pid}/fd/1").read_text(errors="replace")


def assert_uses(engine: RunningEngine, case: EngineCase) -> None:
    """Assert that the engine has the kernels, capacity, exchange and projections of its settings."""
    settings, log = case.settings, log_of(engine)
    kernels = "torch" if settings.get("cpu_kernels") == "torch" else "C"
    assert f"{kernels} kernels" in engine.server.decode_method()
    capacity = case.dcp * settings.get("max_total_tokens", 4096)
    assert re.findall(r"max_total_num_tokens=(\d+)", log)[-1] == str(capacity)
    assert f"'dcp_comm_backend': '{settings.get('dcp_comm', 'ag_rs')}'" in log
    replicates = "each rank computes the queries of its group in 2 layers" in log
    assert replicates == settings.get("dcp_replicate_q", False)


@pytest.mark.parametrize(
    ("engines", "name"), [(case.model, name) for name, case in CASES.items()], indirect=["engines"], scope="module"
)
def test_tokens_and_logprobs_are_those_without_dcp_and_exact(name: str, engines: ModelEngines) -> None:
    """Compare with a cold cache, after aborts, with prefix hits and after a push by each transport.

    Prompts shorter than the group leave a rank without tokens. Engines with ``chunked_prefill_size`` prefill long
    prompts in chunks.
    """
    case, engine, models, expected = CASES[name], engines.sharded[name], engines.models, engines.reference
    for version, weights in enumerate("ABA"):
        if version == 1:
            engine.run(engine.push(models.tensors(weights), version))
        elif version == 2:
            push_by_process_group(engine, models, weights, version)
        for is_cached in (False, True) if version < 2 else (False,):
            completions = greedy(engine, PROMPTS)
            expected.check(completions, weights)
            hits = [completion.cached_tokens for completion in completions]
            if not is_cached:
                assert not any(hits)
            elif "dp_attention" not in case.settings:  # its ranks have separate prefix caches
                assert hits == case.hits()
            if not version and not is_cached:
                abort(engine)
    scores = engine.run(engine.client.score([PROMPTS[-1]], 1.0))[0]
    np.testing.assert_allclose(scores, expected.scores, rtol=0, atol=SAME)
    assert_same(samples(engine), expected.samples)
    assert_uses(engine, case)


@engines_of("qwen3_next")
def test_decode_steps_keep_the_states_of_hybrid_models_at_pages(engines: ModelEngines) -> None:
    """A prompt that continues a response starts from a state that was cached while the response was decoded."""
    sharded = engines.sharded["qwen3_next tp2 dcp2"]
    ids = prompt(STATES - 24, seed=4)
    (completion,) = greedy(sharded, [ids], 40)
    continued_prompts = [np.concatenate([ids, completion.token_ids[:36]])]
    responses = greedy(sharded, continued_prompts)
    assert responses[0].cached_tokens == STATES
    assert_same(responses, greedy(engines.unsharded, continued_prompts))


@engines_of("qwen3")
def test_the_time_of_exchanges_is_reported_once(engines: ModelEngines) -> None:
    async def usage(engine: RunningEngine) -> KvUsage:
        await engine.client.kv_usage()
        await engine.client.generate(PROMPTS[-1], [0], make_sampling(0.0, TOKENS))
        return await engine.client.kv_usage()

    sharded, unsharded = engines.sharded["qwen3 tp2 dcp2"], engines.unsharded
    times = sharded.run(usage(sharded))
    assert times.decode_steps == TOKENS - 1 and times.dcp_exchange_s is not None and times.dcp_exchange_s > 0
    assert sharded.run(sharded.client.kv_usage()).dcp_exchange_s == 0
    assert unsharded.run(usage(unsharded)).dcp_exchange_s is None


@engines_of("qwen3")
def test_the_same_rows_hold_twice_the_tokens_and_running_out_changes_nothing(engines: ModelEngines) -> None:
    """Run so many sequences that requests are retracted, and prefilled again later."""
    sharded, unsharded = engines.sharded["qwen3 tp2 dcp2"], engines.unsharded
    prompts = [prompt(20, seed=seed) for seed in range(16)]
    assert_same(greedy(sharded, prompts, 30), greedy(unsharded, prompts, 30))
    assert "retract" in log_of(sharded).lower()


@engines_of("llama")
def test_admission_by_the_cache_retracts_no_request(engines: ModelEngines) -> None:
    """``rollout.max_running_requests=auto`` counts the tokens of all ranks."""
    by_cache, unsharded = engines.sharded["llama by cache"], engines.unsharded
    prompts = [prompt(20, seed=seed) for seed in range(16)]
    by_cache.run(by_cache.drop_prefixes())
    by_cache.run(by_cache.client.kv_usage())
    assert_same(greedy(by_cache, prompts, 30), greedy(unsharded, prompts, 30))
    usage = by_cache.run(by_cache.client.kv_usage())
    assert usage.retractions == 0
    assert usage.capacity_tokens == 2 * ROWS and usage.running_requests_max > ROWS // 50


@engines_of("qwen3", "qwen3_next")
def test_requests_in_flight_continue_under_new_weights(engines: ModelEngines) -> None:
    sharded, models = next(iter(engines.sharded.values())), engines.models
    ids, tokens = prompt(21, seed=3), 120
    for completion in generate_over_two_pushes(sharded, models, ids, tokens):
        np.testing.assert_allclose(completion.logprobs, logprobs_by_version(models, ids, completion), atol=1e-4)
