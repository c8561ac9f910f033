"""Engines whose KV cache is spread over ranks return the tokens and log-probabilities of engines without DCP."""

from __future__ import annotations

import asyncio
import contextlib
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from slime_like.cluster.workers import trainer_worker
from slime_like.config.schema.resolved import TransportSpec
from slime_like.interfaces import Completion
from slime_like.rollout.engine.replies import KvUsage
from slime_like.types import I32
from tests.engine import hybrid_models, test_families
from tests.engine.conftest import Models, RunningEngine, launch, make_sampling, prompt
from tests.engine.forked_engines import ForkedEngineServer
from tests.engine.in_flight import generate_over_two_pushes, logprobs_by_version
from tests.engine.test_weights import TensorSource

pytestmark = [pytest.mark.engine, pytest.mark.slow]
ROWS = 256  # of each rank's pool
LENGTHS = (1, 2, 3, 40, 97)
TOKENS = 12
SAME = 1e-5  # largest difference of log-probabilities


@dataclass(frozen=True)
class ModelCase:
    """Shape of a random model."""

    family: str
    kv_heads: int = 1
    fields: Mapping[str, Any] = field(default_factory=dict[str, Any])


TWELVE = {"num_attention_heads": 12, "intermediate_size": 96, "vocab_size": 576}  # divisible by three and four ranks
MODELS = {
    "qwen3": ModelCase("qwen3", fields=TWELVE),
    "qwen2": ModelCase("qwen2", kv_heads=2),  # with biases
    "llama": ModelCase("llama"),
    "qwen3_moe": ModelCase("qwen3_moe", kv_heads=2),
    "qwen3_next": ModelCase("qwen3_next"),
    "qwen3_5_text": ModelCase("qwen3_5_text", kv_heads=2, fields={"linear_num_key_heads": 4}),
}
HYBRIDS = ("qwen3_next", "qwen3_5_text")


def build(folder: Path, case: ModelCase) -> Models:
    """Return random models A and B."""
    from transformers import AutoConfig, AutoModelForCausalLM

    if case.family in HYBRIDS:
        fields = {**hybrid_models.SHAPE, **hybrid_models.FAMILIES[case.family]}
    else:
        shape = {**test_families.SHAPE, "head_dim": 16, "tie_word_embeddings": False}
        fields = {**test_families.FAMILIES.get(case.family, {}), **shape}
    fields |= {"num_key_value_heads": case.kv_heads, **case.fields}
    hf: dict[str, Any] = {}
    for seed, name in enumerate("AB"):
        torch.manual_seed(seed)
        hf[name] = AutoModelForCausalLM.from_config(AutoConfig.for_model(case.family, **fields)).eval()
        hf[name].save_pretrained(folder / name)
    return hybrid_models.HybridModels({name: folder / name for name in hf}, hf)


@dataclass(frozen=True)
class EngineCase:
    """An engine of a model."""

    model: str
    tp: int = 2
    dcp: int = 2
    settings: Mapping[str, Any] = field(default_factory=dict[str, Any])


A2A = {"dcp_comm": "a2a"}
REPLICATED = {**A2A, "dcp_replicate_q": True}
CASES = {
    "sharded": EngineCase("qwen3", settings={"max_total_tokens": ROWS, "chunked_prefill_size": 32}),
    "qwen3 tp4 dcp4": EngineCase("qwen3", 4, 4, A2A),
    "qwen3 tp3 dcp3": EngineCase("qwen3", 3, 3, {**REPLICATED, "cpu_kernels": "torch"}),
    "qwen2 tp4 dcp2": EngineCase("qwen2", 4, 2, REPLICATED),
    "by cache": EngineCase("llama", settings={"max_total_tokens": ROWS, "max_running_requests": None}),
    "qwen3_moe tp4 dcp2": EngineCase("qwen3_moe", 4, 2, {**A2A, "cpu_kernels": "torch"}),
    "qwen3_next tp2 dcp2": EngineCase("qwen3_next", 2, 2, A2A),
    "qwen3_5_text tp4 dcp2": EngineCase("qwen3_5_text", 4, 2),
}
UNSHARDED = {model: EngineCase(model, 1, 1) for model in MODELS} | {"qwen3": EngineCase("qwen3", 2, 1)}
"""Engines without DCP, by the name of their model."""


@dataclass(frozen=True)
class EnginePairs:
    """Running engines by the name of their case, and the models they serve."""

    engines: Mapping[str, RunningEngine]
    models: Mapping[str, Models]

    def pair(self) -> tuple[RunningEngine, RunningEngine, Models]:
        """Return an engine with a small KV cache, the engine of the same model without DCP, and the model."""
        return self.engines["sharded"], self.engines["qwen3"], self.models["qwen3"]


@pytest.fixture(scope="module")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EnginePairs]:
    """Engines of all cases, started side by side from one process that has imported SGLang."""
    models = {name: build(tmp_path_factory.mktemp(name), case) for name, case in MODELS.items()}
    with contextlib.ExitStack() as stack:
        launches: dict[str, Any] = {}
        for name, case in (UNSHARDED | CASES).items():
            settings: dict[str, Any] = {"dcp": case.dcp, "server_type": ForkedEngineServer, **case.settings}
            folder = tmp_path_factory.mktemp("logs")
            launches[name] = stack.enter_context(
                contextlib.closing(launch(models[case.model], folder, case.tp, **settings))
            )
            assert next(launches[name]) is None
        yield EnginePairs({name: next(run) for name, run in launches.items()}, models)


def greedy(engine: RunningEngine, prompts: list[I32], tokens: int = TOKENS) -> list[Completion]:
    """Greedy responses to prompts that are sent together."""

    async def all_of_them() -> list[list[Completion]]:
        return await asyncio.gather(*(engine.client.generate(ids, [0], make_sampling(0.0, tokens)) for ids in prompts))

    return [completion for (completion,) in engine.run(all_of_them())]


def assert_same(actual: list[Completion], expected: list[Completion]) -> None:
    for a, b in zip(actual, expected, strict=True):
        np.testing.assert_array_equal(a.token_ids, b.token_ids)
        np.testing.assert_allclose(a.logprobs, b.logprobs, rtol=0, atol=SAME)


PROMPTS = [prompt(length, seed=length) for length in LENGTHS]


def hits(case: EngineCase) -> list[int]:
    """Return the tokens of each prompt in complete pages, which have a token per rank; states of hybrids are not cached."""
    return [0 if case.model in HYBRIDS else (length - 1) // case.dcp * case.dcp for length in LENGTHS]


def assert_exact(completions: list[Completion], models: Models, weights: str) -> None:
    """Assert that greedy responses to ``PROMPTS`` have the most probable tokens of transformers, and their log-probabilities."""
    for ids, completion in zip(PROMPTS, completions, strict=True):
        sequence = torch.from_numpy(np.concatenate([ids, completion.token_ids]).astype(np.int64))
        with torch.no_grad():
            logits_RV = models.hf[weights](sequence[None]).logits[0, len(ids) - 1 : -1]
        logprobs_R, tokens_R = torch.log_softmax(logits_RV, -1).max(-1)
        np.testing.assert_array_equal(completion.token_ids, tokens_R.numpy())
        np.testing.assert_allclose(completion.logprobs, logprobs_R.numpy(), rtol=0, atol=SAME)


def abort(engine: RunningEngine) -> None:
    """Abort two requests that continue the last prompt."""

    async def start_and_abort() -> list[Completion]:
        request = asyncio.create_task(engine.client.generate(PROMPTS[-1], [1, 2], make_sampling(tokens=180)))
        await engine.client.generate(prompt(5), [9], make_sampling(tokens=8))  # by then both usually have tokens
        await engine.client.abort_all()
        return await request

    lengths = [len(completion.token_ids) for completion in engine.run(start_and_abort())]
    assert all(0 < length < 180 for length in lengths), lengths


@pytest.mark.parametrize("name", CASES)
def test_tokens_and_logprobs_are_those_without_dcp_and_exact(name: str, pairs: EnginePairs) -> None:
    """Compare with a cold cache, after aborts, with prefix hits and after a push.

    Prompts shorter than the group leave a rank without tokens; the sharded engine prefills long ones in chunks.
    """
    case, sharded = CASES[name], pairs.engines[name]
    models, unsharded = pairs.models[case.model], pairs.engines[case.model]
    for version, weights in enumerate("ABA"):
        for engine in (sharded, unsharded) if version else ():
            engine.run(engine.push(models.tensors(weights), version))
        for is_cached in (False, True) if version < 2 else ():
            completions = greedy(sharded, PROMPTS)
            assert_exact(completions, models, weights)
            assert_same(completions, greedy(unsharded, PROMPTS))
            if is_cached:
                assert [completion.cached_tokens for completion in completions] == hits(case)
            elif not version:
                abort(sharded)
    ids = PROMPTS[-1]
    scores = sharded.run(sharded.client.score([ids], 1.0))[0]
    np.testing.assert_allclose(scores, models.logprobs("A", ids, 1.0), rtol=0, atol=SAME)
    samples = [
        engine.run(engine.client.generate(ids, [1, 2, 3], make_sampling(0.8, TOKENS)))
        for engine in (sharded, unsharded)
    ]
    assert_same(*samples)


def log_of(engine: RunningEngine) -> str:
    return Path(f"/proc/{engine.server.pid}/fd/1").read_text(errors="replace")


def test_each_engine_uses_what_its_settings_name(pairs: EnginePairs) -> None:
    for name, case in CASES.items():
        settings, log = case.settings, log_of(pairs.engines[name])
        kernels = "torch" if settings.get("cpu_kernels") == "torch" else "C"
        assert f"{kernels} kernels" in pairs.engines[name].server.decodes_with()
        capacity = case.dcp * settings.get("max_total_tokens", 4096)
        assert re.findall(r"max_total_num_tokens=(\d+)", log)[-1] == str(capacity)
        assert f"'dcp_comm_backend': '{settings.get('dcp_comm', 'ag_rs')}'" in log
        assert ("each rank computes the queries of its group in 2 layers" in log) == settings.get(
            "dcp_replicate_q", False
        )


def test_the_time_of_exchanges_is_reported_once(pairs: EnginePairs) -> None:
    async def usage(engine: RunningEngine) -> KvUsage:
        await engine.client.kv_usage()
        await engine.client.generate(PROMPTS[-1], [0], make_sampling(0.0, TOKENS))
        return await engine.client.kv_usage()

    sharded, unsharded = pairs.engines["sharded"], pairs.engines["qwen3"]
    times = sharded.run(usage(sharded))
    assert times.decode_steps == TOKENS - 1 and times.dcp_exchange_s is not None and times.dcp_exchange_s > 0
    assert sharded.run(sharded.client.kv_usage()).dcp_exchange_s == 0
    assert unsharded.run(usage(unsharded)).dcp_exchange_s is None


def test_the_same_rows_hold_twice_the_tokens_and_running_out_changes_nothing(pairs: EnginePairs) -> None:
    """Run so many sequences that requests are retracted, and prefilled again later."""
    sharded, unsharded, _ = pairs.pair()
    prompts = [prompt(20, seed=seed) for seed in range(16)]
    assert_same(greedy(sharded, prompts, 60), greedy(unsharded, prompts, 60))
    assert "retract" in log_of(sharded).lower()


def test_admission_by_the_cache_retracts_no_request(pairs: EnginePairs) -> None:
    """``rollout.max_running_requests=auto`` counts the tokens of all ranks."""
    by_cache, unsharded = pairs.engines["by cache"], pairs.engines["llama"]
    prompts = [prompt(20, seed=seed) for seed in range(16)]
    by_cache.run(by_cache.client.flush())
    by_cache.run(by_cache.client.kv_usage())
    assert_same(greedy(by_cache, prompts, 60), greedy(unsharded, prompts, 60))
    usage = by_cache.run(by_cache.client.kv_usage())
    assert usage.retractions == 0
    assert usage.capacity_tokens == 2 * ROWS and usage.running_requests_max > ROWS // 80


def test_pushes_by_both_transports(pairs: EnginePairs, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trainer_worker, "_own_address", lambda: "127.0.0.1")
    sharded, unsharded, models = pairs.pair()
    transport = TransportSpec(kind="broadcast", backend="gloo", max_bytes=1 << 20, deadline_s=60)
    sender = trainer_worker._make_sender([sharded.client], transport, "dcp")
    sharded.run(sharded.push(models.tensors("B"), 1))
    unsharded.run(unsharded.push(models.tensors("B"), 1))
    assert_same(greedy(sharded, PROMPTS), greedy(unsharded, PROMPTS))
    sharded.run(sharded.update(sender.send(TensorSource(models.tensors("A"))), 2))
    sharded.run(sender.close())
    unsharded.run(unsharded.push(models.tensors("A"), 2))
    assert_same(greedy(sharded, PROMPTS), greedy(unsharded, PROMPTS))


@pytest.mark.parametrize(("name", "tokens"), [("sharded", 120), ("qwen3_next tp2 dcp2", 60)])
def test_requests_in_flight_continue_under_new_weights(name: str, tokens: int, pairs: EnginePairs) -> None:
    sharded, models = pairs.engines[name], pairs.models[CASES[name].model]
    ids = prompt(21, seed=3)
    for completion in generate_over_two_pushes(sharded, models, ids, tokens):
        np.testing.assert_allclose(completion.logprobs, logprobs_by_version(models, ids, completion), atol=1e-4)
