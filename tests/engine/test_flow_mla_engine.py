"""Engines with FlowMLA return the results of engines without it, over pushes by every path. Both have two data-parallel attention ranks.

Engines of Qwen3 have sums in a fixed order, with which an engine returns the same bits at every repetition. There is no such attention
over latents: repetitions of a request to one engine differ by up to 5e-7, with FlowMLA or without. ``test_flow_mla.py`` compares bits
of latent attention layers. Requests are sent one at a time; a rank without a request runs idle batches meanwhile.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from slime_like.config.schema.flow_mla import FlowOptions
from slime_like.errors import EngineError
from tests.engine.conftest import Models, RunningEngine, launch, make_sampling, prompt
from tests.engine.forked_engines import ForkedEngineServer, start_fork_server
from tests.engine.latent_models import build
from tests.engine.test_latent import CHUNK, assert_agrees, push

pytestmark = pytest.mark.engine
WEIGHTS = {"deepseek_v3": ("o_proj", "q_proj", "kv_b_proj", "a_proj"), "qwen3": ("o_proj", "qkv_proj")}
REPETITION = 1e-6
"""Bound on the difference of log-probabilities between repetitions of a request to one engine with latent attention."""
QWEN3_BYTES = 4 * 4 * (64 * 64 + 64 * (64 + 32 + 32))
"""Bytes of o_proj and qkv_proj in 4 layers with hidden size 64, 4 query heads and 2 KV heads of width 16."""


@dataclass(frozen=True)
class EngineArms:
    """Two engines of one model: with full weights on each rank, and with FlowMLA."""

    models: Models
    plain: RunningEngine
    flow: RunningEngine


@pytest.fixture(scope="module", params=WEIGHTS)
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
    }
    with contextlib.ExitStack() as stack:
        runs: list[Any] = []
        for flow_mla in ("", FlowOptions(WEIGHTS[request.param]).to_json()):
            run = launch(models, tmp_path_factory.mktemp("run"), 2, flow_mla=flow_mla, **settings)
            runs.append(stack.enter_context(contextlib.closing(run)))
            assert next(run) is None
        yield EngineArms(models, *(next(run) for run in runs))


def log_text(engine: RunningEngine) -> str:
    """Return the engine's log."""
    return Path(engine.server._spec.log_path).read_text()  # pyright: ignore[reportPrivateUsage]


def answers(engine: RunningEngine, models: Models, name: str) -> list[Any]:
    """Return token ids, log-probabilities and scores of requests sent one at a time, which agree with transformers."""
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
    """At the start, after pushes over shared memory and a process group in buckets of one tensor, and after a load from disk."""
    for version, name in enumerate("ABAB"):
        results: list[list[Any]] = []
        for engine in (pair.plain, pair.flow):
            if version in (1, 2):
                engine.run(push(engine, pair.models.tensors(name), version))
            elif version == 3:
                engine.run(update_from_disk(engine, pair.models.paths[name]))
            results.append(answers(engine, pair.models, name))
        tolerance = REPETITION if pair.models.hf["A"].config.model_type == "deepseek_v3" else 0.0
        for plain, sharded in zip(*results, strict=True):
            np.testing.assert_allclose(plain, sharded, rtol=0, atol=tolerance)


def test_requests_that_arrive_together(pair: EngineArms) -> None:
    """Of several lengths, so that ranks prefill, decode and idle at the same time."""
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
    """The attention of a layer is missing, of which each rank holds a part. A complete update follows."""
    engine, tensors = pair.flow, pair.models.tensors("A")
    part = {name: tensor for name, tensor in tensors.items() if "layers.1.self_attn" not in name}
    with pytest.raises(EngineError, match=r"rank 0: .*layers\.1\.self_attn.*rank 1: .*layers\.1\.self_attn"):
        engine.run(engine.push(part, 11))
    engine.run(engine.push(tensors, 12))
    answers(engine, pair.models, "A")


def test_a_rank_holds_the_bytes_of_the_formula(pair: EngineArms) -> None:
    """The log has the bytes in memory: ``W / 2 + 2 W / 4``, with four equal layers."""
    text = log_text(pair.flow)
    if pair.models.hf["A"].config.model_type == "qwen3":
        full = QWEN3_BYTES
        line = f"{full} ({full // 2} private, {2 * full // 4} in 2 slots)"
        assert (
            len(re.findall(re.escape(f"{full // 2 + 2 * full // 4} bytes of each rank instead of {line}"), text)) == 2
        )
    assert "module by module" in text, "the fused forward would read packed copies of the weights"
    assert "slime_like FlowMLA" not in log_text(pair.plain)
