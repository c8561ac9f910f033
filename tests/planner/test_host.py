"""Memory on a CPU: the quickstart's models compared with measured processes, and constants that the engine's plugin also has."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from slime_like.cluster.plan.machine import numa_nodes
from slime_like.planner.config_json import shape_of
from slime_like.planner.constants import GIB, MIB
from slime_like.planner.engine import state_bytes, token_bytes, weight_items
from slime_like.planner.engine_settings import EngineSettings
from slime_like.planner.host import (
    KV_TOKENS,
    MAX_PACKED_BYTES,
    MAX_STATE_BYTES,
    MEMORY_FRACTION,
    RUNNING,
    SLOTS_PER_REQUEST,
    host_engine,
    host_pool,
    host_trainer,
    rank_weights,
)
from slime_like.planner.models import find_shape
from slime_like.planner.shapes import ModelShape
from slime_like.planner.trainer import TrainerSettings
from slime_like.quickstart.model import DENSE, GDN, NEXT, ModelSpec, config_fields

ENGINE = EngineSettings(gpus=1, weights="float32", kv_bytes=4)


def shape(spec: ModelSpec) -> ModelShape:
    return shape_of({"model_type": spec.model_type, **config_fields(spec)}, spec.model_type)


@pytest.mark.parametrize(
    ("spec", "measured"), [(DENSE, 2_264), (GDN, 2_346), (NEXT, 2_321)], ids=["dense", "gdn", "next"]
)
def test_engine_of_a_quickstart_model(spec: ModelSpec, measured: int) -> None:
    pool = host_pool(shape(spec), ENGINE, available=13 * GIB)
    assert pool.tokens == 65_536  # SGLang's max_total_num_tokens of all three
    assert host_engine(shape(spec), ENGINE, pool).total / MIB == pytest.approx(measured, rel=0.1)


@pytest.mark.parametrize(
    ("spec", "tokens", "measured"),
    [(DENSE, 2_048, 836), (DENSE, 8_192, 1_068), (GDN, 8_192, 1_400), (NEXT, 4_096, 1_184)],
    ids=["dense-2048", "dense-8192", "gdn-8192", "next-4096"],
)
def test_trainer_of_a_quickstart_model(spec: ModelSpec, tokens: int, measured: int) -> None:
    table = host_trainer(shape(spec), TrainerSettings(tokens=tokens, dtype="float32"))
    assert table.total / MIB == pytest.approx(measured, rel=0.1)


WIDE = EngineSettings(gpus=2, weights="bfloat16", max_running=256)  # settings of a model that fills main memory
FREE = 40 * GIB


def test_capacity_is_the_static_fraction_of_the_free_memory_less_the_weights_of_all_ranks() -> None:
    model = find_shape("MODEL", "Qwen3-0.6B")
    room = 0.3 * FREE - 2 * model.parameters
    pool = host_pool(model, replace(WIDE, max_tokens=2**31), FREE)
    assert pool.tokens == pytest.approx(room / (2 * 28 * 4 * 128 * 2), rel=1e-3)
    half = host_pool(model, replace(WIDE, max_tokens=2**31, static=0.15), FREE)
    assert half.tokens < pool.tokens / 2, "the weights do not shrink"
    assert host_pool(model, replace(WIDE, max_tokens=1_024), FREE).tokens == 1_024
    assert host_pool(model, replace(WIDE, max_tokens=1_024, dcp=2), FREE).tokens == 2_048
    assert host_pool(model, WIDE, available=GIB).tokens == 0


def test_each_rank_has_the_free_memory_of_one_numa_node() -> None:
    model, settings = find_shape("MODEL", "Qwen3-0.6B"), replace(WIDE, max_tokens=2**31)
    one_node, two_nodes = (host_pool(model, settings, FREE, numa_nodes=nodes).tokens for nodes in (1, 2))
    assert one_node - 2 * two_nodes in (0, 1)


@pytest.mark.upstream
@pytest.mark.slow
def test_numa_nodes_and_their_division_are_sglangs(monkeypatch: pytest.MonkeyPatch) -> None:
    import sglang.srt.utils.common as sglang

    assert numa_nodes() == len(sglang.get_cpu_ids_by_node())
    monkeypatch.setattr(sglang, "get_free_cpu_memory", lambda: FREE)
    for nodes in (1, 2, 4):
        monkeypatch.setattr(sglang, "get_cpu_ids_by_node", lambda nodes=nodes: ["0"] * nodes)
        assert sglang.get_available_gpu_memory("cpu", 0) * GIB == FREE / nodes


def test_states_of_a_large_hybrid_model_take_sglangs_share() -> None:
    model, settings = find_shape("MODEL", "Qwen3.5-0.8B"), replace(WIDE, gpus=1)
    room = 0.3 * FREE - sum(item.num_bytes for item in weight_items(model, settings))
    slot = state_bytes(model, settings)
    pool = host_pool(model, settings, FREE)
    assert pool.slots + 1 == int(room * 0.9 / 1.9 // slot)
    assert pool.tokens == min(65_536, int((room - (pool.slots + 1) * slot) // token_bytes(model, settings)))
    assert host_pool(model, replace(settings, state_slots=40), FREE).slots == 40
    assert host_pool(shape(GDN), ENGINE, FREE).slots == 2_048


def test_large_weights_are_not_packed() -> None:
    model = find_shape("MODEL", "Qwen3-0.6B")
    table = host_engine(model, ENGINE, host_pool(model, ENGINE, FREE))
    assert table.of("packed weights") == 0
    assert table.of("weights") == pytest.approx(4 * model.parameters, rel=1e-3)


def test_defaults_are_those_of_the_engines_plugin() -> None:
    from slime_like_plugins.sglang_cpu import products
    from slime_like_plugins.sglang_cpu.hybrid import states

    assert (RUNNING, SLOTS_PER_REQUEST) == (states.RUNNING, states.SLOTS_PER_REQUEST)
    assert (MAX_STATE_BYTES, MAX_PACKED_BYTES) == (states.MAX_BYTES, products.MAX_BYTES)
    source = (Path(states.__file__).parents[1] / "platform.py").read_text()
    assert f"KV_TOKENS = {KV_TOKENS:_}" in source and f"MEMORY_FRACTION = {MEMORY_FRACTION}" in source


def test_ranks_with_memory_of_their_own() -> None:
    """The cache of a rank depends on its own memory and ``max_total_tokens``, as on a GPU, not on the machine or other ranks."""
    settings = replace(WIDE, static=0.8, rank_memory=20 * GIB)
    model = find_shape("MODEL", "Qwen3-0.6B")
    expected = (0.8 * 20 * GIB - rank_weights(model, settings)) // token_bytes(model, settings)
    assert host_pool(model, settings, available=GIB, numa_nodes=2).tokens == expected > KV_TOKENS
    assert host_pool(model, replace(settings, max_tokens=100), available=GIB).tokens == 100
    assert host_pool(model, replace(settings, rank_memory=MIB), available=GIB).tokens == 0


def test_data_parallel_attention_has_as_many_recurrent_states_as_one_rank() -> None:
    """The number of states is for all ranks together, in any layout."""
    spread = replace(ENGINE, gpus=2, dp_attention=2)
    assert host_pool(shape(GDN), spread, available=13 * GIB).slots == host_pool(shape(GDN), ENGINE, 13 * GIB).slots
