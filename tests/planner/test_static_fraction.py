"""SGLang's default static fraction, computed by the planner and by the installed SGLang for the same engine."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import product
from types import SimpleNamespace
from typing import Any

import pytest

from slime_like.cluster.plan.engine import engine_settings
from slime_like.config.schema.resolved import EngineSpec
from slime_like.hardware import GPUS
from slime_like.planner.constants import MIB
from slime_like.planner.models import find_shape
from slime_like.planner.shapes import ModelShape
from slime_like.planner.static_fraction import static_fraction
from slime_like.rollout.engine.main import EngineLaunch, server_arguments

pytestmark = [pytest.mark.upstream, pytest.mark.slow]  # importing SGLang takes seconds

# MiB: memory of GPUs, and the lower bound of each of SGLang's classes
MEMORY = (15_360, 20_480, 24_564, 35_840, 46_068, 61_440, 61_441, 81_559, 97_871, 143_771, 163_840, 294_912)
LAYOUTS = ((1, 1, None), (2, 1, 24), (4, 1, None), (8, 1, 400), (4, 2, None), (8, 8, 24), (32, 32, None))
"""Tensor parallel size, dp_attention, max_running_requests."""
MODELS = ("Qwen3-4B", "DeepSeek-R1")
OPTIONS: tuple[dict[str, Any], ...] = (
    {},
    {"chunked_prefill_size": 1_024},
    {"chunked_prefill_size": 32_768},
    {"chunked_prefill_size": -1, "max_prefill_tokens": 4_096},
    {"max_total_tokens": 5_000},
    {"disable_cuda_graph": True},
    {"disable_decode_cuda_graph": True},
    {"disable_prefill_cuda_graph": True},
    {"disable_cuda_graph": True, "cuda_graph_backend_prefill": "full"},
    {"cuda_graph_backend_decode": "disabled", "cuda_graph_bs_prefill": [64, 512, 4_096]},
    {"cuda_graph_max_bs_decode": 1_024, "cuda_graph_max_bs_prefill": 600},
    {"cuda_graph_bs_decode": [1, 8, 24]},
    {"enable_two_batch_overlap": True},
    {"moe_a2a_backend": "deepep"},
    {"moe_a2a_backend": "deepep", "disable_decode_cuda_graph": True},
    {"moe_a2a_backend": "mooncake"},
    {"mem_fraction_static": 0.6},
)


def sglang_fraction(spec: EngineSpec, latent: bool) -> float:
    """Return mem_fraction_static as SGLang resolves it from the arguments of our engine."""
    from sglang.srt.arg_groups.cuda_graph_hook import handle_cuda_graph_config
    from sglang.srt.arg_groups.memory_hook import handle_gpu_memory_settings
    from sglang.srt.arg_groups.overrides import resolving_view
    from sglang.srt.configs.model_config import AttentionArch
    from sglang.srt.server_args import ServerArgs

    args: Any = ServerArgs(**server_arguments(EngineLaunch(spec, "key", "127.0.0.1", 1)))
    args._model_config = SimpleNamespace(
        is_multimodal=False,
        attention_arch=AttentionArch.MLA if latent else AttentionArch.MHA,
        hf_config=SimpleNamespace(architectures=["Model"], model_type="model"),
    )
    handle_cuda_graph_config(args)
    handle_gpu_memory_settings(args)
    return resolving_view(args).mem_fraction_static


@pytest.fixture
def gpu_memory(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return a list whose only element, in MiB, SGLang takes for the memory of an NVIDIA GPU."""
    from sglang.srt.arg_groups import memory_hook
    from sglang.srt.model_executor import cuda_graph_config

    memory = [0]
    monkeypatch.setattr(memory_hook, "get_device_memory_capacity", lambda _: float(memory[0]))
    monkeypatch.setattr(cuda_graph_config, "default_prefill_backend", lambda: cuda_graph_config.Backend.BREAKABLE)
    return memory


def mismatches(shape: ModelShape, spec: EngineSpec, memory: list[int]) -> list[str]:
    """Return the GPUs for which planner and SGLang differ."""
    differences: list[str] = []
    for mib in MEMORY:
        memory[0] = mib
        gpu = replace(GPUS["H100"], memory=mib * MIB)
        actual, expected = (
            static_fraction(shape, engine_settings(spec), gpu),
            sglang_fraction(spec, shape.latent is not None),
        )
        if actual != expected:
            differences.append(f"{mib} MiB, {spec}: planner {actual}, SGLang {expected}")
    return differences


@pytest.mark.parametrize("options", OPTIONS, ids=json.dumps)
def test_fraction_is_sglangs_for_every_gpu_and_layout(options: dict[str, Any], gpu_memory: list[int]) -> None:
    spec = EngineSpec("model", "cuda", "bfloat16", 1, 64, 0, "", 1.0)
    for name, (tp, dp, requests) in product(MODELS, LAYOUTS):
        changed = replace(spec, tp=tp, dp_attention=dp, max_running_requests=requests, sglang=options)
        assert not mismatches(find_shape("MODEL", name), changed, gpu_memory)


@pytest.mark.parametrize("options", [{}, {"disable_decode_cuda_graph": True}], ids=json.dumps)
def test_fraction_is_sglangs_under_dcp(options: dict[str, Any], gpu_memory: list[int]) -> None:
    spec = EngineSpec("model", "cuda", "bfloat16", 8, 64, 0, "", 1.0, dcp=2, sglang=options)
    assert not mismatches(find_shape("MODEL", "Qwen3-235B-A22B"), spec, gpu_memory)


def test_sglang_sizes_the_pool_after_graph_capture_only_if_asked_to() -> None:
    from sglang.srt.environ import envs

    assert not envs.SGLANG_ENABLE_POST_CAPTURE_KV_SIZING.get()
