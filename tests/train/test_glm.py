"""GLM-4 and GLM-4.5: loss, gradients and logprobs equal transformers', and an export equals the loaded weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from slime_like.config.schema.resolved import Layout
from tests.train.jobs import SP, RankJob, Results
from tests.train.parity import assert_equals_hf, comparison
from tests.train.weights import assert_refused, assert_same_tensors, assert_shards_merge, family_of

pytestmark = pytest.mark.ranks

BOUND = 1e-5
KINDS = ("glm4", "glm4_moe")
CASES: dict[int, dict[str, tuple[str, Layout]]] = {
    1: {f"{kind} single": (kind, Layout()) for kind in KINDS},
    2: {
        "glm4 tp2": ("glm4", Layout(tp=2)),
        "glm4 tp2 sp": ("glm4", Layout(**SP)),
        "glm4 cp2": ("glm4", Layout(cp=2)),
        "glm4_moe pp2": ("glm4_moe", Layout(pp=2)),
        "glm4_moe cp2": ("glm4_moe", Layout(cp=2)),
        "glm4_moe ep2": ("glm4_moe", Layout(dp=2, ep=2)),
        "glm4_moe tp2 sp ep2": ("glm4_moe", Layout(ep=2, **SP)),
    },
}
ROUND_TRIP = {f"round trip {name}": CASES[2][name] for name in ("glm4 tp2 sp", "glm4_moe tp2 sp ep2")}
FAULT = "channels paired in halves"
JOBS = {
    size: [RankJob(name, "tests.train.parity:compare", (*case, {}, None)) for name, case in cases.items()]
    for size, cases in CASES.items()
}
JOBS[1] += [RankJob(FAULT, "tests.train.parity:compare", ("glm4", Layout(), {}, "channels_paired_in_halves"))]
JOBS[2] += [RankJob(name, "tests.train.lifecycle:round_trip", case) for name, case in ROUND_TRIP.items()]
NAMES = [name for cases in CASES.values() for name in cases]


@pytest.mark.parametrize("name", NAMES)
def test_equals_hf(name: str, results: Results) -> None:
    assert_equals_hf(comparison(results, name), BOUND)


def test_an_injected_fault_exceeds_the_bound(results: Results) -> None:
    errors = comparison(results, FAULT)
    assert max(errors.worst, errors.score) > 100 * BOUND, errors


@pytest.mark.parametrize("name", ROUND_TRIP)
def test_loaded_weights_are_exported_bit_for_bit(name: str, models: dict[str, Path], results: Results) -> None:
    assert_same_tensors(results[name][0], models[ROUND_TRIP[name][0]])


@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize("kind", KINDS)
def test_shards_merge_to_the_hf_tensors(models: dict[str, Path], kind: str, tp: int) -> None:
    assert_shards_merge(family_of(models[kind], kind, tp), models[kind], tp)


def test_biases_and_norms_of_heads_depend_on_the_config(models: dict[str, Path]) -> None:
    weights = family_of(models["glm4_moe"], "glm4_moe", attention_bias=False, use_qk_norm=False).weights()
    absent = {f"blocks.0.self_attention.{name}" for name in ("linear_qkv.bias", "q_layernorm.weight")}
    assert not absent & weights.keys()
    assert absent <= family_of(models["glm4_moe"], "glm4_moe").weights().keys()


@pytest.mark.parametrize(
    ("kind", "change", "message"),
    [
        ("glm4", {"hidden_act": "gelu"}, "hidden_act='gelu' of a glm4 model"),
        ("glm4_moe", {"norm_topk_prob": False}, "norm_topk_prob=False of a glm4_moe model"),
    ],
)
def test_an_unsupported_variant_is_refused(
    models: dict[str, Path], kind: str, change: dict[str, Any], message: str
) -> None:
    assert_refused(models[kind], kind, 1, change, message)
