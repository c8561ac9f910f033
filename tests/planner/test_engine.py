"""Memory of engines: formulas that have a closed form, and refusals."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest

from slime_like.cluster.plan.phases import Offloads, phase_memory
from slime_like.errors import ConfigError
from slime_like.hardware import GPUS, known_gpu, parse_hardware
from slime_like.planner import constants
from slime_like.planner.answer import answer, phases
from slime_like.planner.engine import (
    engine_memory,
    state_bytes,
    token_bytes,
    useful_dcp,
    weight_items,
)
from slime_like.planner.engine_settings import EngineSettings, check_engine
from slime_like.planner.flow_mla import check_flow_mla, flow_projections, flow_saving, flow_slots
from slime_like.planner.models import MODELS, find_shape, table_config
from slime_like.planner.shapes import latent_parts
from slime_like.planner.speed import Workload
from slime_like.planner.trainer import TrainerSettings, trainer_memory

H20 = parse_hardware("--on", "8xH20")


@pytest.mark.parametrize(
    ("name", "billions", "active"),
    [
        ("Qwen3-0.6B", 0.596, 0.596),
        ("Qwen3-4B", 4.022, 4.022),
        ("Qwen3-8B", 8.191, 7.568),
        ("Qwen3-30B-A3B", 30.53, 3.04),
        ("Qwen3-235B-A22B", 235.09, 21.57),
        ("Qwen3-Next-80B-A3B", 79.67, 3.56),
        ("Qwen3.5-0.8B", 0.7524, 0.7524),
        ("Qwen2.5-7B", 7.616, 7.07),
        ("Llama-3.1-8B", 8.03, 7.50),
        ("DeepSeek-R1", 671.03, 36.63),
        ("DeepSeek-V2-Lite", 15.706, 2.451),
    ],
)
def test_parameters_are_those_of_the_public_model(name: str, billions: float, active: float) -> None:
    shape = find_shape("MODEL", name)
    assert shape.parameters / 1e9 == pytest.approx(billions, rel=1e-3)
    assert shape.active_parameters / 1e9 == pytest.approx(active, rel=2e-3)


@pytest.mark.parametrize(("tp", "dcp"), [(1, 1), (2, 1), (4, 1), (8, 1), (8, 2), (16, 4)])
def test_kv_bytes_follow_the_heads_that_a_rank_holds(tp: int, dcp: int) -> None:
    shape = find_shape("MODEL", "Qwen3-235B-A22B")
    per_token = token_bytes(shape, EngineSettings(tp, dcp=dcp))
    assert per_token == 2 * 94 * 128 * 2 * max(1, 4 * dcp / tp) / dcp


def test_capacity_grows_by_the_useful_dcp_size_and_no_further() -> None:
    shape, settings = find_shape("MODEL", "Qwen3-235B-A22B"), EngineSettings(8, prefill_graphs=0)
    tokens = {dcp: engine_memory(shape, replace(settings, dcp=dcp), H20).tokens for dcp in (1, 2, 4)}
    assert useful_dcp(shape, settings) == 2
    assert tokens[2] / tokens[1] == pytest.approx(2, rel=1e-3)
    assert tokens[4] <= tokens[2]
    assert useful_dcp(find_shape("MODEL", "DeepSeek-R1"), EngineSettings(8)) == 8


def test_replicated_query_projections_and_symmetric_memory_are_counted() -> None:
    shape = find_shape("MODEL", "Qwen3-235B-A22B")
    plain = EngineSettings(8, dcp=2)
    sizes = {item.name: item.num_bytes for item in engine_memory(shape, plain, H20).table.items}
    replicated = engine_memory(shape, replace(plain, replicated_q=True), H20)
    symmetric = engine_memory(shape, replace(plain, symmetric_memory=True), H20)
    attention = next(item.num_bytes for item in replicated.table.items if item.name == "attention")
    # Layers, bytes, hidden size, queries of two ranks.
    assert attention - sizes["attention"] == 94 * 2 * 4096 * (64 * 128) * 2 / 8
    (reserved,) = (item.num_bytes for item in symmetric.table.items if item.name == "symmetric memory")
    assert reserved == 4 * 2**30 and "symmetric memory" not in sizes


def test_flow_mla_saves_the_articles_formula() -> None:
    shape, settings = find_shape("MODEL", "DeepSeek-R1"), EngineSettings(32, dp_attention=32, flow_mla=("o_proj",))
    assert shape.latent is not None
    weights = 61 * latent_parts(shape.hidden, shape.latent)["output"]
    saved_bytes = weights * (1 - 1 / 32) - 2 * weights / 61 * 31 / 32
    assert flow_saving(shape, settings) == pytest.approx(saved_bytes)
    assert 2 * saved_bytes / 1e9 == pytest.approx(13.4, rel=0.01)
    plain = sum(item.num_bytes for item in weight_items(shape, replace(settings, flow_mla=())))
    assert plain - sum(item.num_bytes for item in weight_items(shape, settings)) == pytest.approx(2 * saved_bytes)


@pytest.mark.parametrize("model", ["DeepSeek-R1", "Qwen3-4B"])
def test_flow_mla_of_an_engine_has_buffers_for_whole_layers(model: str) -> None:
    """The buffers are larger than the article's by this rank's part of each layer, with latent attention and with grouped queries."""
    shape = find_shape("MODEL", model)
    names = flow_projections(shape, "all")
    article = EngineSettings(8, dp_attention=4, flow_mla=names)
    engine = replace(article, flow_slots=2)
    sizes = {item.name: item.num_bytes for item in weight_items(shape, engine)}
    plain = {item.name: item.num_bytes for item in weight_items(shape, replace(engine, flow_mla=()))}
    slots = flow_slots(shape, engine)
    assert slots == pytest.approx(flow_slots(shape, article) * 4 / 3)
    assert sizes["FlowMLA slots"] == 2 * slots == pytest.approx(flow_slots(shape, replace(engine, flow_slots=4)))
    weights = slots / 2 * len(shape.layers)
    assert plain["attention"] - sizes["attention"] == pytest.approx(2 * weights * 3 / 4)
    assert plain["attention"] == pytest.approx(2 * weights, rel=1e-3)  # without norms, all of the attention
    hardware = parse_hardware("--on", "8xH20")
    memory, larger = (engine_memory(shape, settings, hardware) for settings in (engine, article))
    assert larger.pool > memory.pool


def test_recurrent_state_is_one_matrix_per_head_and_a_window() -> None:
    shape = find_shape("MODEL", "Qwen3-Next-80B-A3B")
    state = 36 * (32 * 128 * 128 * 4 + (2 * 16 * 128 + 32 * 128) * 3 * 2)
    assert state_bytes(shape, EngineSettings(1)) == state
    assert state_bytes(shape, EngineSettings(4)) == state / 4
    memory = engine_memory(shape, EngineSettings(8), H20)
    slots = int(memory.table.of("recurrent states") // memory.slot_bytes) - 1  # one is padding
    assert memory.requests(1) == slots // 5 > 0
    assert engine_memory(shape, EngineSettings(8, states_per_request=1), H20).requests(1) == slots


@pytest.mark.parametrize(("slots", "tokens", "limit"), [(3, 1_000, "recurrent states"), (99, 10**9, "the KV cache")])
def test_the_limit_names_what_has_no_room_for_a_request(slots: int, tokens: int, limit: str) -> None:
    shape = find_shape("MODEL", "Qwen3-Next-80B-A3B")
    result = answer(shape, EngineSettings(8, state_slots=slots), H20, Workload(tokens, 100))
    assert result.batch == 0 and result.limit.startswith(limit) and "no room for one request" in result.limit


def test_everything_in_the_table_adds_up_to_the_gpu_of_a_tuned_engine() -> None:
    memory = engine_memory(find_shape("MODEL", "DeepSeek-R1"), EngineSettings(8, weights="fp8", tuned=True), H20)
    assert memory.table.total == pytest.approx(H20.gpu.memory)


@pytest.mark.parametrize("is_tuned", [False, True])
@pytest.mark.parametrize("model", ["Qwen3-8B", "DeepSeek-R1"])
def test_an_engine_that_releases_its_memory_keeps_as_much_as_in_the_plan_of_a_run(model: str, is_tuned: bool) -> None:
    settings = EngineSettings(8, weights="fp8", tuned=is_tuned)
    shape, trainer = find_shape("MODEL", model), TrainerSettings(dp=8)
    engine, releasable, rank = (
        engine_memory(shape, settings, H20).table,
        engine_memory(shape, replace(settings, prefill_graphs=0), H20).table,
        trainer_memory(shape, trainer),
    )
    ways = {way.name: way for way in phases(engine, releasable, rank, H20.gpu.memory)}
    planned = {
        phase.name: phase.total
        for phase in phase_memory({"trainer": rank, "engine": releasable}, None, Offloads(train=True, rollout=True))
    }
    assert ways["they take turns"].training == ways["the engine releases its memory"].training == planned["step"]
    assert ways["they take turns"].sampling == planned["collect"]
    assert ways["both stay"].training == ways["both stay"].sampling == rank.total + engine.total


def test_the_reserve_of_a_tuned_engine_has_context_communicators_and_the_rest() -> None:
    settings = EngineSettings(8, weights="fp8", dp_attention=8, replicated_head=True, tuned=True)
    table = engine_memory(find_shape("MODEL", "DeepSeek-R1"), settings, H20).table
    reserve = constants.LEAST_RESERVE.value + 8 * constants.SGLANG_PARALLEL.value
    assert table.of("CUDA context", "communicators", "reserve") == pytest.approx(reserve)
    assert min(table.of(name) for name in ("CUDA context", "communicators", "reserve")) > 0
    assert table.of("CUDA graphs") == 0, "part of the reserve"


def test_weights_above_the_gpu_leave_no_pool_and_no_negative_item() -> None:
    memory = engine_memory(find_shape("MODEL", "Qwen3-235B-A22B"), EngineSettings(1), H20)
    assert memory.pool < 0 and memory.tokens == memory.requests(1) == 0
    assert memory.table.total > H20.gpu.memory and all(item.num_bytes > 0 for item in memory.table.items)


@pytest.mark.parametrize(
    ("model", "settings", "message"),
    [
        ("Qwen3-4B", EngineSettings(8, dp_attention=3), "--dp-attention 3 does not divide the engine's 8 GPUs"),
        ("Qwen3-4B", EngineSettings(8, dcp=3), "--dcp 3 does not divide the 8 ranks"),
        ("Qwen3-4B", EngineSettings(6), "does not divide the 32 attention heads"),
        (
            "Qwen3-4B",
            EngineSettings(8, dp_attention=8, flow_mla=("kv_b_proj",)),
            r"kv_b_proj.* set --flow-mla all \(o_proj, qkv_proj\)",
        ),
        ("DeepSeek-R1", EngineSettings(8, flow_mla=("o_proj",)), "--dp-attention 1"),
    ],
)
def test_impossible_layouts_are_refused_with_flag_and_numbers(
    model: str, settings: EngineSettings, message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        check_engine(find_shape("MODEL", model), settings)
        check_flow_mla(find_shape("MODEL", model), settings)


@pytest.mark.parametrize(
    ("driver", "name"),
    [
        ("NVIDIA H100 80GB HBM3", "H100"),
        ("NVIDIA H200", "H200"),
        ("NVIDIA H20", "H20"),
        ("NVIDIA H20-3e", "H20-3e"),
        ("NVIDIA H100 NVL", "H100-NVL"),
        ("NVIDIA H100 PCIe", "H100-PCIe"),
        ("NVIDIA A100 80GB PCIe", "A100-PCIe"),
        ("NVIDIA L4", "L4"),
        ("NVIDIA L40S", "L40S"),
        ("NVIDIA GH200 480GB", None),
        ("NVIDIA A100-SXM4-40GB", "A100-40GB"),
        ("NVIDIA A100-SXM4-80GB", "A100"),
        ("NVIDIA GeForce RTX 4090", "RTX4090"),
        ("Tesla V100-SXM2-32GB", None),
    ],
)
def test_names_of_the_driver_are_known(driver: str, name: str | None) -> None:
    gpu = known_gpu(driver)
    assert (None if gpu is None else gpu.name) == name


def test_hardware_is_nodes_times_gpus() -> None:
    hardware = parse_hardware("--on", "4x8xH800")
    assert (hardware.nodes, hardware.gpus, hardware.num_gpus, str(hardware)) == (4, 8, 32, "4x8xH800")
    assert all(gpu.source for gpu in GPUS.values())


@pytest.mark.parametrize(
    ("name", "model"),
    [("models/Qwen3-4B", "Qwen3-4B"), ("Qwen/Qwen3-235B-A22B-Instruct-2507", "Qwen3-235B-A22B"), ("Qwen3-4Bx", None)],
)
def test_paths_and_variants_have_the_shape_of_their_base(name: str, model: str | None) -> None:
    assert table_config(name) == (None if model is None else MODELS[model])


def test_models_of_pages_and_recipes_are_in_the_table() -> None:
    """A command of a page can be planned without the model's files."""
    root = Path(__file__).parents[2]
    files = [
        *root.glob("*.md"),
        *(path for folder in ("docs", "docker", "configs") for path in root.joinpath(folder).rglob("*.*")),
    ]
    texts = [path.read_text() for path in files if path.suffix in (".md", ".yaml")]
    names = {name for text in texts for name in re.findall(r"\bmodels/([A-Z][\w.-]*\w)", text)}
    assert {"Qwen3-4B", "DeepSeek-V2-Lite"} <= names
    assert sorted(names - MODELS.keys()) == []  # not table_config, which takes DeepSeek-V2-Lite for a DeepSeek-V2
