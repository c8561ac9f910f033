"""Engines with FlowMLA on two GPUs: results, pushes, and a release of memory."""

from __future__ import annotations

import contextlib
from collections.abc import Generator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from slime_like.config.schema.flow_mla import FlowOptions
from slime_like.config.schema.resolved import EngineSpec
from tests.engine import latent_models
from tests.engine.conftest import Models, RunningEngine, serve
from tests.engine.dcp_engines import PROMPTS, ModelCase, build, greedy

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")]
MAX_DIFFERENCE = 0.15  # difference of log-probabilities, as in a run with bfloat16
WEIGHTS = {"qwen3": ("o_proj", "qkv_proj"), "deepseek_v3": ("o_proj", "q_proj", "kv_b_proj", "a_proj")}


def make(folder: Path, model: str) -> Models:
    """Return models A and B whose sizes the kernels support."""
    if model == "deepseek_v3":
        sizes = {"kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64}
        return latent_models.build(folder, model, initializer_range=0.05, **sizes)
    return build(folder, ModelCase(model, fields={"hidden_size": 256, "head_dim": 64, "initializer_range": 0.05}))


@contextlib.contextmanager
def running(models: Models, folder: Path, model: str, transport: str, **sglang: Any) -> Generator[RunningEngine]:
    """Run an engine of two data-parallel attention ranks that share the attention weights."""
    spec = EngineSpec(
        *(str(models.paths["A"]), "cuda", "bfloat16", 2, 512, 0, str(folder / "log"), 600, 64),
        dp_attention=2,
        flow_mla=FlowOptions(WEIGHTS[model], transport=transport).to_json(),
        latent=model == "deepseek_v3",
        sglang={"max_total_tokens": 4096, **sglang},
    )
    with contextlib.closing(serve(spec)) as engines:
        assert next(engines) is None
        engine = next(engines)
        assert engine is not None
        yield engine


def check(engine: RunningEngine, models: Models, weights: str) -> None:
    """Compare greedy responses with transformers."""
    for ids, completion in zip(PROMPTS, greedy(engine, PROMPTS), strict=True):
        sequence = np.concatenate([ids, completion.token_ids]).astype(np.int32)
        expected = models.logprobs(weights, sequence, 1.0)[-len(completion.token_ids) :]
        np.testing.assert_allclose(completion.logprobs, expected, rtol=0, atol=MAX_DIFFERENCE)


@pytest.mark.parametrize("transport", ["collective", "p2p"])
@pytest.mark.parametrize("model", WEIGHTS)
def test_an_engine_agrees_with_transformers_before_and_after_pushes(model: str, transport: str, tmp_path: Path) -> None:
    models = make(tmp_path, model)
    with running(models, tmp_path, model, transport) as engine:
        for version, weights in enumerate("ABA"):
            if version:
                engine.run(engine.push(models.tensors(weights), version))
            check(engine, models, weights)
    assert (tmp_path / "log").read_text().count(f"over 2 ranks ({transport})") == 2


@pytest.mark.parametrize("model", WEIGHTS)
def test_memory_is_released_and_taken_back(model: str, tmp_path: Path) -> None:
    """Neither parts nor slots are valid after the memory has returned, so a push follows."""
    models = make(tmp_path, model)
    with running(models, tmp_path, model, "collective", enable_memory_saver=True) as engine:
        check(engine, models, "A")
        connection: Any = engine.client._connection  # pyright: ignore[reportPrivateUsage]
        free = [torch.cuda.mem_get_info(gpu)[0] for gpu in range(2)]
        engine.run(engine.client.pause())
        engine.run(connection.post("memory", "/release_memory_occupation", {}))
        assert all(torch.cuda.mem_get_info(gpu)[0] > before for gpu, before in enumerate(free))
        engine.run(connection.post("memory", "/resume_memory_occupation", {}))
        engine.run(engine.push(models.tensors("B"), 1))
        check(engine, models, "B")
