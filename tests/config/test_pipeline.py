"""Pipeline segments: layers per segment from Megatron's keys, and inconsistent keys refused."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slime_like.cluster.plan.machine import Machine
from slime_like.cluster.plan.planner import make_plan
from slime_like.cluster.plan.view import render_plan
from slime_like.config.load.loader import load_config
from slime_like.config.rules.pipeline import parse_layout, segments
from slime_like.config.schema.model import ParallelConfig
from slime_like.errors import ConfigError

CASES: dict[str, tuple[dict[str, object], int, tuple[int, ...]]] = {
    "one rank": ({}, 5, (5,)),
    "even": ({"pp": 2}, 4, (2, 2)),
    "a rest": ({"pp": 2}, 5, (3, 2)),
    "virtual": ({"pp": 2, "vpp": 2}, 8, (2, 2, 2, 2)),
    "virtual by layers": ({"pp": 2, "layers_per_virtual_stage": 1}, 6, (1,) * 6),
    "first": ({"pp": 2, "first_stage_layers": 1}, 4, (1, 3)),
    "last": ({"pp": 3, "last_stage_layers": 2}, 8, (3, 3, 2)),
    "both": ({"pp": 4, "first_stage_layers": 3, "last_stage_layers": 1}, 10, (3, 3, 3, 1)),
    "both, virtual": ({"pp": 3, "vpp": 2, "first_stage_layers": 2, "last_stage_layers": 4}, 8, (1, 1, 2) * 2),
    "layout": ({"pp": 2, "pipeline_layout": "Et|tt|t,t|tL"}, 6, (1, 2, 2, 1)),
    "layout with repeats": ({"pp": 2, "pipeline_layout": "Et*3|(tt|)*2tL"}, 8, (3, 2, 2, 1)),
}
WRONG: dict[str, tuple[dict[str, object], int, list[str]]] = {
    "pp": ({"pp": 3}, 2, ["parallel.pp=3", "2 layers", "lower parallel.pp"]),
    "vpp": ({"pp": 2, "vpp": 2}, 3, ["parallel.pp=2 * parallel.vpp=2 = 4", "3 layers", "lower parallel.vpp"]),
    "no pipeline": ({"vpp": 2}, 4, ["parallel.vpp=2", "parallel.pp=1", "raise parallel.pp"]),
    "layers per stage": (
        {"pp": 2, "layers_per_virtual_stage": 3},
        8,
        ["=3 * parallel.pp=2 = 6", "8 layers", "1, 2, 4"],
    ),
    "two ways": (
        {"pp": 2, "vpp": 2, "layers_per_virtual_stage": 1},
        4,
        ["parallel.vpp=2 with", "remove parallel.vpp, or"],
    ),
    "first too large": (
        {"pp": 2, "first_stage_layers": 4},
        4,
        ["first_stage_layers=4 leave 0", "4 layers", "other 1 of"],
    ),
    "middle": ({"pp": 3, "first_stage_layers": 1}, 4, ["leave 3 of the model's 4", "the other 2 of parallel.pp=3"]),
    "sum": (
        {"pp": 2, "first_stage_layers": 1, "last_stage_layers": 2},
        4,
        ["leave 1 of", "the other 0 of parallel.pp=2"],
    ),
    "virtual": ({"pp": 2, "vpp": 2, "first_stage_layers": 1}, 5, ["[1, 4] layers", "parallel.vpp=2 does not divide 1"]),
    "layout sum": ({"pp": 2, "pipeline_layout": "Ett|tL"}, 4, ["2 + 1 = 3 layers", "the model has 4"]),
    "layout ranks": ({"pp": 2, "pipeline_layout": "Et|t|tL"}, 3, ["3 segments", "parallel.pp=2 does not divide"]),
    "layout vpp": ({"pp": 2, "vpp": 3, "pipeline_layout": "Et|tL"}, 2, ["= 1 per rank", "parallel.vpp=3"]),
    "layout and first": ({"pp": 2, "first_stage_layers": 1, "pipeline_layout": "Et|tL"}, 2, ["sets the whole layout"]),
    "layout letters": ({"pp": 2, "pipeline_layout": "Etm|tL"}, 2, ["'Etm|tL' has 'm'"]),
    "layout without E": ({"pp": 2, "pipeline_layout": "t|tL"}, 2, ["write the embedding E once, at the start"]),
    "layout too long": ({"pp": 2, "pipeline_layout": "Et*99999999999|tL"}, 2, ["correct the numbers after *"]),
    "layout too long, by groups": (
        {"pp": 2, "pipeline_layout": "E(t*9999|)*999tL"},
        2,
        ["correct the numbers after *"],
    ),
    "layout, empty": ({"pp": 3, "pipeline_layout": "Et||tL"}, 2, ["segment 2 of 3 has no layer"]),
}


@pytest.mark.parametrize("name", CASES)
def test_keys_give_layers_per_segment(name: str) -> None:
    keys, num_layers, expected = CASES[name]
    assert segments(ParallelConfig(**keys), num_layers) == expected  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize("name", WRONG)
def test_inconsistent_keys_are_refused_with_the_numbers(name: str) -> None:
    keys, num_layers, words = WRONG[name]
    with pytest.raises(ConfigError) as error_info:
        segments(ParallelConfig(**keys), num_layers)  # pyright: ignore[reportArgumentType]
    assert all(word in str(error_info.value) for word in words), str(error_info.value)


sizes = st.none() | st.integers(1, 6)


@given(st.integers(1, 6), st.integers(1, 4), sizes, sizes, st.integers(1, 40))
def test_every_layer_is_in_one_segment(pp: int, vpp: int, first: int | None, last: int | None, num_layers: int) -> None:
    keys = ParallelConfig(pp=pp, vpp=vpp, first_stage_layers=first, last_stage_layers=last)
    try:
        layers = segments(keys, num_layers)
    except ConfigError:
        return
    assert sum(layers) == num_layers and len(layers) == pp * vpp and min(layers) > 0
    assert first is None or sum(layers[0::pp]) == first
    assert last is None or sum(layers[pp - 1 :: pp]) == last


@given(st.lists(st.integers(1, 5), min_size=1, max_size=6))
def test_a_layout_reads_back(layers: list[int]) -> None:
    assert parse_layout("E" + "|".join("t" * n for n in layers) + "L") == tuple(layers)
    assert parse_layout("E" + "|".join(f"t*{n}" for n in layers) + "L") == tuple(layers)


def test_the_plan_counts_and_shows_the_segments(argv: list[str]) -> None:
    machine = Machine(8, 64, 512 * 2**30, ("H100",) * 8)
    cfg = load_config([*argv, "--pipeline-model-parallel-size", "2", "--num-layers-per-virtual-pipeline-stage", "1"])
    plan = make_plan(cfg, machine)
    assert (plan.actor.layout.vpp, plan.actor.layout.segments) == (2, (1, 1, 1, 1))
    text = render_plan(cfg, plan, machine)
    assert "pp 2 of 2 virtual stages" in text and "layers per pipeline segment" in text


def test_a_model_that_does_not_fit_is_refused_at_load(argv: list[str]) -> None:
    with pytest.raises(ConfigError, match="first_stage_layers=5 leave -1 of the model's 4 layers"):
        load_config([*argv, "parallel.pp=2", "parallel.first_stage_layers=5"])
