"""Decode context parallelism on GPUs: engines with SGLang's and this project's backends, and the exchange clock."""

from __future__ import annotations

import contextlib
import importlib.util
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from slime_like.config.schema.resolved import EngineSpec
from slime_like_plugins.dcp import exchange_time
from slime_like_plugins.dcp.exchange_time import STRIDE, DeviceClock
from tests.engine import latent_models
from tests.engine.conftest import Models, RunningEngine, serve
from tests.engine.dcp_engines import PROMPTS, ModelCase, build, greedy
from tests.values import has_values

NUM_GPUS = torch.cuda.device_count()
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not NUM_GPUS, reason="needs a GPU")]
ROWS = 4096  # rows of each rank's pool
MAX_DIFFERENCE = 0.15  # difference of log-probabilities, as in a run with bfloat16


@dataclass(frozen=True)
class GpuCase:
    """An engine with DCP, and the part of its settings that differs from the default."""

    model: str = "qwen3"
    backend: str | None = None
    fields: Mapping[str, Any] = field(default_factory=dict[str, Any])


A2A = {"dcp_comm": "a2a"}
FLASHINFER = ("flashinfer", "flashinfer a2a", "flashinfer symmetric", "deepseek_v3", "deepseek_v3 a2a")
CASES = {
    "triton": GpuCase(),
    "triton hybrid": GpuCase("qwen3_5_text"),
    "triton symmetric": GpuCase(fields={"symmetric_memory": True}),
    "flashinfer": GpuCase(backend="flashinfer"),
    "flashinfer a2a": GpuCase(backend="flashinfer", fields=A2A),
    "flashinfer symmetric": GpuCase(backend="flashinfer", fields={"symmetric_memory": True}),
    "deepseek_v3": GpuCase("deepseek_v3", fields={"latent": True}),
    "deepseek_v3 a2a": GpuCase("deepseek_v3", fields={"latent": True, **A2A}),
}


def make(folder: Path, model: str) -> Models:
    """Return models A and B whose sizes the kernels support."""
    small = {"initializer_range": 0.05}
    if model == "deepseek_v3":
        return latent_models.build(folder, model, kv_lora_rank=512, qk_nope_head_dim=128, qk_rope_head_dim=64, **small)
    heads = {"linear_key_head_dim": 64, "linear_value_head_dim": 64} if model == "qwen3_5_text" else {}
    return build(folder, ModelCase(model, fields={"hidden_size": 256, "head_dim": 64, **heads, **small}))


@pytest.mark.skipif(NUM_GPUS < 2, reason="needs two GPUs")
@pytest.mark.parametrize("name", CASES)
def test_an_engine_of_two_ranks_agrees_with_transformers(name: str, tmp_path: Path) -> None:
    """Compare with a cold cache, with prefix hits and after pushes; the engine's cache is twice a rank's."""
    if name in FLASHINFER and importlib.util.find_spec("flashinfer") is None:
        pytest.skip("needs flashinfer-python")
    case = CASES[name]
    models = make(tmp_path, case.model)
    spec = EngineSpec(
        *(str(models.paths["A"]), "cuda", "bfloat16", 2, 512, 0, str(tmp_path / "log"), 600, 64),
        dcp=2,
        sglang={"max_total_tokens": ROWS} | ({"attention_backend": case.backend} if case.backend else {}),
        **case.fields,
    )
    with contextlib.closing(serve(spec)) as engines:
        assert next(engines) is None
        engine = next(engines)
        assert engine is not None
        for version, weights in enumerate("AAB"):
            if version:
                engine.run(engine.push(models.tensors(weights), version))
            for is_cached in (False, True):
                check(engine, models, weights, is_cached and case.model != "qwen3_5_text")
        usage = engine.run(engine.client.kv_usage())
        assert usage.capacity_tokens == 2 * ROWS
        assert usage.dcp_exchange_s is not None and usage.dcp_exchange_s > 0


def check(engine: RunningEngine, models: Models, weights: str, is_cached: bool) -> None:
    """Assert that greedy responses agree with transformers and, if ``is_cached``, hit the prefix cache."""
    for ids, completion in zip(PROMPTS, greedy(engine, PROMPTS), strict=True):
        sequence = np.concatenate([ids, completion.token_ids]).astype(np.int32)
        expected = models.logprobs(weights, sequence, 1.0)[-len(completion.token_ids) :]
        np.testing.assert_allclose(completion.logprobs, expected, rtol=0, atol=MAX_DIFFERENCE)
        if is_cached:
            assert completion.cached_tokens == (len(ids) - 1) // 2 * 2


def test_the_clock_of_exchanges_agrees_with_events_around_all_of_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """Time exchanges outside graphs, and replays of a graph."""
    monkeypatch.setattr(exchange_time, "_clocks", [])
    numbers = torch.randn(2048, 2048, device="cuda")
    group: Any = type("Group", (), dict.fromkeys(exchange_time.METHODS, lambda self, x: x @ x))()
    exchange_time.measure(group, DeviceClock(torch.cuda))

    def milliseconds(work: Any) -> float:
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        work()
        end.record()
        torch.cuda.synchronize()
        return begin.elapsed_time(end)

    def exchanges() -> None:
        for _ in range(10 * STRIDE):
            group.all_gather(numbers)

    exchanges()
    torch.cuda.synchronize()
    exchange_time.take(0)
    eager_ms = milliseconds(exchanges)
    exchange_s = exchange_time.take(0)
    assert exchange_s is not None and exchange_s > 0
    if has_values():
        assert exchange_s == pytest.approx(1e-3 * eager_ms, rel=0.2)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        exchanges()
    graph.replay()
    replay_ms = milliseconds(graph.replay)
    exchange_s = exchange_time.take(3)
    assert exchange_s is not None and exchange_s > 0
    if has_values():
        assert exchange_s == pytest.approx(3e-3 * replay_ms, rel=0.2)
