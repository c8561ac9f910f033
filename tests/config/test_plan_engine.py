"""Settings of an engine that the plan reads, and the KV cache that it predicts for the load of a rollout."""

from __future__ import annotations

import re
from typing import Any

import pytest

from slime_like.cluster.plan.engine import engine_settings
from slime_like.cluster.plan.machine import Machine, described_machine
from slime_like.cluster.plan.planner import make_plan
from slime_like.cluster.plan.view import render_plan, show_plan
from slime_like.config.load.loader import load_config
from slime_like.config.rules import foreign
from slime_like.config.schema.flow_mla import FlowOptions
from slime_like.config.schema.remote_experts import RemoteOptions
from slime_like.config.schema.resolved import EngineSpec
from slime_like.rollout.engine.main import EngineLaunch, server_arguments
from tests.config.recipe_plans import WIDE, plan


@pytest.mark.parametrize(
    ("device", "dcp", "options", "states"),
    [
        ("cuda", 1, {}, 5),
        ("cuda", 1, {"disable_overlap_schedule": True}, 3),
        ("cuda", 1, {"mamba_radix_cache_strategy": "extra_buffer", "disable_overlap_schedule": True}, 4),
        ("cuda", 1, {"mamba_radix_cache_strategy": "extra_buffer_lazy"}, 4),
        ("cuda", 1, {"mamba_radix_cache_strategy": "no_buffer"}, 3),
        ("cuda", 1, {"disable_radix_cache": True}, 1),
        ("cpu", 1, {}, 3),
        ("cpu", 2, {}, 4),
        ("cpu", 2, {"disable_radix_cache": True}, 1),
    ],
)
def test_recurrent_states_per_request_are_sglangs(
    device: str, dcp: int, options: dict[str, object], states: int
) -> None:
    spec = EngineSpec("", device, "bfloat16", 2, 64, 0, "", 1.0, dcp=dcp, sglang=options)
    assert engine_settings(spec).states_per_request == states


@pytest.mark.parametrize("dcp", [1, 2])
def test_max_total_tokens_bounds_the_cache_of_a_gpu_for_each_dcp_rank(dcp: int) -> None:
    overrides = (*WIDE, "placement.actor_num_gpus_per_node=8", "rollout.sglang.max_total_tokens=65536")
    memory = plan("qwen3_4b_gsm8k_async", *overrides, f"rollout.dcp={dcp}", machine=described_machine("16xH200")).memory
    assert memory.engine is not None and memory.engine.tokens == 65_536 * dcp
    table = dict(memory.tables)["engine"]
    assert table.of("KV cache") == memory.engine.tokens * memory.engine.token_bytes


class RecordingOptions(dict[str, object]):
    """Options of an engine that record the fields read."""

    def __init__(self) -> None:
        super().__init__()
        self.fields: set[str] = set()

    def get(self, key: str, default: object = None) -> object:  # type: ignore[override]
        self.fields.add(key)
        return default


def test_every_engine_field_that_the_plan_reads_can_be_set() -> None:
    options = RecordingOptions()
    engine_settings(EngineSpec("", "cuda", "bfloat16", 2, 64, 0, "", 1.0, sglang=options))
    assert {"cuda_graph_max_bs_decode", "max_total_tokens"} <= options.fields
    assert options.fields <= foreign.table(foreign.SGLANG).keys() - foreign.OWNED[foreign.SGLANG].keys()


@pytest.mark.parametrize(
    ("options", "graphs"),
    [
        ({}, (True, None, None)),
        ({"disable_cuda_graph": True}, (False, 0, None)),
        ({"disable_decode_cuda_graph": True}, (False, None, None)),
        ({"disable_prefill_cuda_graph": True, "cuda_graph_max_bs_decode": 24}, (True, 0, 24)),
        ({"disable_cuda_graph": True, "cuda_graph_backend_prefill": "full"}, (False, None, None)),
        ({"cuda_graph_backend_decode": "disabled", "cuda_graph_bs_prefill": [64, 512]}, (False, 2, None)),
        ({"cuda_graph_bs_decode": [1, 40], "cuda_graph_max_bs_prefill": 32}, (True, 8, 40)),
        ({"enable_two_batch_overlap": True}, (True, 0, None)),
        ({"moe_a2a_backend": "mooncake"}, (True, 0, None)),
    ],
)
def test_cuda_graphs_are_those_that_sglangs_fields_name(
    options: dict[str, object], graphs: tuple[bool, int | None, int | None]
) -> None:
    settings = engine_settings(EngineSpec("", "cuda", "bfloat16", 2, 64, 0, "", 1.0, sglang=options))
    assert (settings.decode_graphs, settings.prefill_graphs, settings.graph_requests) == graphs


@pytest.mark.parametrize(
    ("fields", "captured"),
    [
        ({"releases_memory": True}, (True, 0)),
        ({"flow_mla": FlowOptions(("o_proj",)).to_json()}, (True, 0)),
        ({"remote_experts": RemoteOptions(count=1).to_json()}, (False, 0)),
        ({"releases_memory": True, "sglang": {"cuda_graph_backend_prefill": "full"}}, (True, None)),
    ],
)
def test_graphs_that_an_engine_does_not_capture_take_no_memory(fields: dict[str, Any], captured: object) -> None:
    spec = EngineSpec("", "cuda", "bfloat16", 2, 64, 0, "", 1.0, **fields)
    settings = engine_settings(spec)
    assert (settings.decode_graphs, settings.prefill_graphs) == captured
    arguments = server_arguments(EngineLaunch(spec, "key", "127.0.0.1", 1))
    backends = [arguments.get(f"cuda_graph_backend_{phase}", "") for phase in ("decode", "prefill")]
    assert [backend != "disabled" for backend in backends] == [settings.decode_graphs, settings.prefill_graphs != 0]


@pytest.mark.parametrize(
    ("device", "fields", "options", "workspaces"),
    [
        ("cuda", {}, {}, 0),
        ("cuda", {}, {"attention_backend": "fa3"}, 0),
        ("cuda", {}, {"attention_backend": "fa3", "decode_attention_backend": "flashinfer"}, 1),
        ("cuda", {}, {"attention_backend": "trtllm_mha"}, 2),
        ("cuda", {}, {"attention_backend": "trtllm_mla"}, 1),
        ("cuda", {}, {"attention_backend": "cutedsl_mla"}, 1),
        ("cuda", {"deterministic": True}, {"attention_backend": "flashinfer"}, 4),
        ("cuda", {"dcp": 2}, {}, 0),
        ("cuda", {"dcp": 2, "latent": True}, {}, 1),
        ("cpu", {"dcp": 2, "latent": True}, {}, 0),
    ],
)
def test_backends_of_flashinfer_have_a_workspace(
    device: str, fields: dict[str, Any], options: dict[str, object], workspaces: int
) -> None:
    spec = EngineSpec("", device, "bfloat16", 2, 64, 0, "", 1.0, sglang=options, **fields)
    assert engine_settings(spec).workspaces == workspaces


def test_a_cpu_run_whose_cache_is_short_is_told_of_dcp() -> None:
    ranks = ("rollout.tp=4", "rollout.sglang.max_total_tokens=2048")
    cfg = load_config(["+recipe=quickstart", *ranks], files=False, machine=False)
    laptop = Machine(0, 4, 16 * 2**30, ())
    text = render_plan(cfg, make_plan(cfg, laptop), laptop)
    assert "KV cache 2,048 tokens per engine: 32 sequences of 64 tokens" in text
    assert "rollout.dcp=2 would hold 4,096 tokens per engine" in text


def test_dcp_is_suggested_if_the_cache_limits_the_rollout_and_ranks_repeat_heads() -> None:
    text = show_plan(["+recipe=qwen3_4b_dapo_async", *WIDE, "placement.actor_num_gpus_per_node=8"], "16xH200")
    assert "rollout.dcp=2 would hold" in text
    assert "rollout.dcp" not in show_plan(["+recipe=qwen3_4b_gsm8k"], "8xH100")


def test_max_running_requests_limits_a_rollout_before_the_cache_does() -> None:
    short = ("rollout.tp=4", "rollout.sglang.max_total_tokens=2048", "rollout.max_running_requests=8")
    cfg = load_config(["+recipe=quickstart", *short], files=False, machine=False)
    laptop = Machine(0, 4, 16 * 2**30, ())
    text = render_plan(cfg, make_plan(cfg, laptop), laptop)
    assert "limited by rollout.max_running_requests" in text and "rollout.dcp=2 would hold" not in text


def test_samples_in_flight_include_the_over_sampled_groups() -> None:
    texts = [
        show_plan(["+recipe=qwen3_4b_gsm8k_async", f"rollout.over_sampling_batch_size={groups}"], "8xH200")
        for groups in (1_024, 2_048)
    ]
    assert [int(re.findall(r"samples ([\d,]+) per engine", text)[0].replace(",", "")) for text in texts] == [
        2_560,
        5_120,
    ]
