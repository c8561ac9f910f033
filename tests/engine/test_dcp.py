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
from slime_like.config.schema.resolved import EngineSpec, TransportSpec
from slime_like.errors import EngineError
from slime_like.interfaces import Completion
from slime_like.rollout.engine.server import EngineServer
from slime_like.types import I32
from tests.engine import hybrid_models, test_families
from tests.engine.conftest import ADMIN_KEY, Engine, Models, launch, make_sampling, prompt
from tests.engine.in_flight import generate_over_two_pushes, logprobs_by_version
from tests.engine.test_weights import TensorSource

pytestmark = [pytest.mark.engine, pytest.mark.slow]
ROWS = 256  # of each rank's pool
LENGTHS = (1, 2, 3, 40, 97)
TOKENS = 24
SAME = 1e-5  # largest difference of log-probabilities


def build(folder: Path, family: str, kv_heads: int) -> Models:
    """Return random models A and B of a family."""
    from transformers import AutoConfig, AutoModelForCausalLM

    if family == "qwen3_5_text":
        fields = {**hybrid_models.SHAPE, **hybrid_models.FAMILIES[family]}
    else:
        shape = {**test_families.SHAPE, "head_dim": 16, "tie_word_embeddings": False}
        fields = {**test_families.FAMILIES.get(family, {}), **shape}
    fields["num_key_value_heads"] = kv_heads
    hf: dict[str, Any] = {}
    for seed, name in enumerate("AB"):
        torch.manual_seed(seed)
        hf[name] = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **fields)).eval()
        hf[name].save_pretrained(folder / name)
    return hybrid_models.HybridModels({name: folder / name for name in hf}, hf)


@dataclass(frozen=True)
class Case:
    """An engine of a family's model."""

    family: str
    tp: int = 2
    dcp: int = 2
    kv_heads: int = 1
    settings: Mapping[str, Any] = field(default_factory=dict[str, Any])


CASES = {
    "whole": Case("qwen3", dcp=1),
    "sharded": Case("qwen3", settings={"max_total_tokens": ROWS, "chunked_prefill_size": 32}),
    "qwen3_moe": Case("qwen3_moe", tp=4, kv_heads=2, settings={"dcp_comm": "a2a", "cpu_kernels": "torch"}),
    "qwen3_5_text": Case("qwen3_5_text", settings={"dcp_comm": "a2a"}),
}


@dataclass(frozen=True)
class Served:
    """Running engines by the name of their case, and the models they serve."""

    engines: Mapping[str, Engine]
    models: Mapping[str, Models]


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """Engines of all cases, started side by side."""
    models: dict[str, Models] = {}
    with contextlib.ExitStack() as stack:
        begun: dict[str, Any] = {}
        for name, case in CASES.items():
            folder = tmp_path_factory.mktemp(name)
            if case.family not in models:
                models[case.family] = build(folder, case.family, case.kv_heads)
            settings: dict[str, Any] = {"dcp": case.dcp, **case.settings}
            begun[name] = stack.enter_context(
                contextlib.closing(launch(models[case.family], folder, case.tp, **settings))
            )
            assert next(begun[name]) is None
        engines = {name: next(run) for name, run in begun.items()}
        yield Served(engines, {name: models[case.family] for name, case in CASES.items()})


def greedy(engine: Engine, prompts: list[I32], tokens: int = TOKENS) -> list[Completion]:
    """Greedy responses to prompts that are sent together."""

    async def all_of_them() -> list[list[Completion]]:
        return await asyncio.gather(*(engine.client.generate(ids, [0], make_sampling(0.0, tokens)) for ids in prompts))

    return [completion for (completion,) in engine.run(all_of_them())]


def assert_same(mine: list[Completion], theirs: list[Completion]) -> None:
    for a, b in zip(mine, theirs, strict=True):
        np.testing.assert_array_equal(a.token_ids, b.token_ids)
        np.testing.assert_allclose(a.logprobs, b.logprobs, rtol=0, atol=SAME)


PROMPTS = [prompt(length, seed=length) for length in LENGTHS]


def test_greedy_tokens_are_the_same_cold_and_after_prefix_hits(served: Served) -> None:
    """Prompts shorter than the group leave a rank without tokens; long ones are prefilled in chunks."""
    whole, sharded = served.engines["whole"], served.engines["sharded"]
    for _ in range(2):
        assert_same(greedy(sharded, PROMPTS), greedy(whole, PROMPTS))
    assert "C kernels" in sharded.server.decodes_with()


def test_the_same_rows_hold_twice_the_tokens_and_running_out_changes_nothing(served: Served) -> None:
    """So many sequences that requests are retracted, and prefilled again later."""
    whole, sharded = served.engines["whole"], served.engines["sharded"]
    log = Path(f"/proc/{sharded.server.pid}/fd/1").read_text(errors="replace")
    assert re.findall(r"max_total_num_tokens=(\d+)", log)[-1] == str(2 * ROWS)
    prompts = [prompt(20, seed=seed) for seed in range(16)]
    assert_same(greedy(sharded, prompts, 60), greedy(whole, prompts, 60))
    log = Path(f"/proc/{sharded.server.pid}/fd/1").read_text(errors="replace")
    assert "retract" in log.lower()


def test_pushes_by_both_transports(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trainer_worker, "_own_address", lambda: "127.0.0.1")
    whole, sharded = served.engines["whole"], served.engines["sharded"]
    models = served.models["sharded"]
    transport = TransportSpec(kind="broadcast", backend="gloo", max_bytes=1 << 20, deadline_s=60)
    sender = trainer_worker._make_sender([sharded.client], transport, "dcp")

    async def broadcast(name: str, version: int) -> None:
        client = sharded.client
        await client.pause()
        await client.begin_update()
        await sender.send(TensorSource(models.tensors(name)))
        await client.end_update(version)
        await client.flush()
        await client.resume()

    sharded.run(sharded.push(models.tensors("B"), 1))
    whole.run(whole.push(models.tensors("B"), 1))
    assert_same(greedy(sharded, PROMPTS), greedy(whole, PROMPTS))
    sharded.run(broadcast("A", 2))
    sharded.run(sender.close())
    whole.run(whole.push(models.tensors("A"), 2))
    assert_same(greedy(sharded, PROMPTS), greedy(whole, PROMPTS))


def test_aborted_requests_leave_a_cache_that_can_be_used(served: Served) -> None:
    whole, sharded = served.engines["whole"], served.engines["sharded"]
    ids = prompt(30, seed=77)

    async def abort() -> list[Completion]:
        request = asyncio.create_task(sharded.client.generate(ids, [1, 2], make_sampling(tokens=180)))
        await sharded.client.generate(prompt(5), [9], make_sampling(tokens=8))
        await sharded.client.abort_all()
        return await request

    lengths = [len(completion.token_ids) for completion in sharded.run(abort())]
    assert all(0 < length < 180 for length in lengths), lengths
    assert_same(greedy(sharded, [ids, *PROMPTS]), greedy(whole, [ids, *PROMPTS]))


def test_requests_in_flight_go_on_over_pushes(served: Served) -> None:
    sharded, models = served.engines["sharded"], served.models["sharded"]
    ids = prompt(21, seed=3)
    for completion in generate_over_two_pushes(sharded, models, ids, 120):
        np.testing.assert_allclose(completion.logprobs, logprobs_by_version(models, ids, completion), atol=1e-4)


@pytest.mark.parametrize("family", ["qwen3_moe", "qwen3_5_text"])
def test_other_families_agree_with_transformers(family: str, served: Served) -> None:
    engine, models = served.engines[family], served.models[family]
    ids = prompt(101, seed=5)
    for version, name in enumerate("AB"):
        if version:
            engine.run(engine.push(models.tensors(name), version))
        (scored,) = engine.run(engine.client.score([ids], 1.0))
        np.testing.assert_allclose(scored, models.logprobs(name, ids, 1.0), atol=test_families.TOLERANCE)
        for _ in range(2):
            for completion in engine.run(engine.client.generate(ids, [1, 2, 3], make_sampling(0.8, tokens=40))):
                whole, new = np.concatenate([ids, completion.token_ids]), len(completion.token_ids)
                expected = models.logprobs(name, whole, 0.8)[-new:]
                np.testing.assert_allclose(completion.logprobs, expected, atol=test_families.TOLERANCE)


def test_an_engine_that_would_compute_wrong_tokens_does_not_start(models: Models, tmp_path: Path) -> None:
    """The engine checks the attention backend that SGLang resolves, although the config's rules were not applied."""
    spec = EngineSpec(
        *(str(models.paths["A"]), "cpu", "float32", 2, 64, 0, str(tmp_path / "log"), 120, 10),
        dcp=2,
        sglang={"attention_backend": "torch_native"},
    )
    server = EngineServer(spec, admin_key=ADMIN_KEY)
    server.start()
    try:
        with pytest.raises(
            EngineError, match="SGLang resolved the attention backend 'torch_native', which cannot serve"
        ):
            server.wait_ready()
    finally:
        server.stop()
