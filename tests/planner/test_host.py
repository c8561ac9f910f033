"""Memory on a CPU: the quickstart's models beside measured processes, and constants that the engine's plugin also has."""

from __future__ import annotations

from pathlib import Path

import pytest

from slime_like.planner.config_json import shape_of
from slime_like.planner.constants import GIB, MIB
from slime_like.planner.engine_settings import EngineSettings
from slime_like.planner.host import (
    KV_TOKENS,
    MEMORY_FRACTION,
    SLOTS_PER_REQUEST,
    STATE_SLOTS,
    host_engine,
    host_tokens,
    host_trainer,
)
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
    tokens = host_tokens(shape(spec), ENGINE, available=13 * GIB)
    assert tokens == 65_536  # SGLang's max_total_num_tokens of all three
    assert host_engine(shape(spec), ENGINE, tokens).total / MIB == pytest.approx(measured, rel=0.1)


@pytest.mark.parametrize(
    ("spec", "tokens", "measured"),
    [(DENSE, 2_048, 836), (DENSE, 8_192, 1_068), (GDN, 8_192, 1_400), (NEXT, 4_096, 1_184)],
    ids=["dense-2048", "dense-8192", "gdn-8192", "next-4096"],
)
def test_trainer_of_a_quickstart_model(spec: ModelSpec, tokens: int, measured: int) -> None:
    table = host_trainer(shape(spec), TrainerSettings(tokens=tokens, dtype="float32"))
    assert table.total / MIB == pytest.approx(measured, rel=0.1)


def test_capacity_is_the_static_fraction_if_memory_is_short() -> None:
    assert host_tokens(shape(DENSE), ENGINE, available=100 * MIB) == pytest.approx(
        0.3 * 100 * MIB / (2 * 3 * 64 * 4), rel=0.1
    )
    assert host_tokens(shape(DENSE), ENGINE, available=13 * GIB, limit=1_024) == 1_024


def test_defaults_are_those_of_the_engines_plugin() -> None:
    from slime_like_plugins.sglang_cpu.hybrid import states

    assert (STATE_SLOTS, SLOTS_PER_REQUEST) == (states.SLOTS_PER_REQUEST * states.RUNNING, states.SLOTS_PER_REQUEST)
    source = (Path(states.__file__).parents[1] / "platform.py").read_text()
    assert f"KV_TOKENS = {KV_TOKENS:_}" in source and f"MEMORY_FRACTION = {MEMORY_FRACTION}" in source
