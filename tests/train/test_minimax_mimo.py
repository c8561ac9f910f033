"""MiniMax-M2 and MiMo: loss, gradients and logprobs equal transformers', and an export equals the loaded weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from slime_like.config.schema.resolved import Layout
from slime_like.train.megatron.families.hf import HFFolder
from slime_like.train.megatron.families.mimo import Mimo
from slime_like.train.megatron.model.transformer_config import choose_family
from tests.train.jobs import SP, RankJob, Results
from tests.train.models import make_spec
from tests.train.parity import assert_equals_hf, comparison
from tests.train.weights import assert_refused, assert_same_tensors, assert_shards_merge, family_of

pytestmark = pytest.mark.ranks

BOUND = 1e-5
KINDS = ("minimax_m2", "mimo")
TP_EP = Layout(ep=2, **SP)
CASES: dict[int, dict[str, tuple[str, Layout]]] = {
    1: {"minimax_m2 single": ("minimax_m2", Layout())},
    2: {
        "minimax_m2 tp2 sp ep2": ("minimax_m2", TP_EP),
        "minimax_m2 pp2": ("minimax_m2", Layout(pp=2)),
        "minimax_m2 cp2": ("minimax_m2", Layout(cp=2)),
        "mimo pp2": ("mimo", Layout(pp=2)),
    },
}
ROUND_TRIP = {f"round trip {name}": CASES[2][name] for name in ("minimax_m2 tp2 sp ep2", "mimo pp2")}
FAULTS = ("norms_of_own_heads", "gradients_of_own_heads")
SAVED, CONVERTED = "reshard from minimax_m2 tp2", "minimax_m2 converted"
JOBS = {
    size: [RankJob(name, "tests.train.parity:compare", (*case, {}, None)) for name, case in cases.items()]
    for size, cases in CASES.items()
}
JOBS[2] += [RankJob(fault, "tests.train.parity:compare", ("minimax_m2", TP_EP, {}, fault)) for fault in FAULTS]
JOBS[2] += [RankJob(name, "tests.train.lifecycle:round_trip", case) for name, case in ROUND_TRIP.items()]
JOBS[2] += [RankJob(SAVED, "tests.train.lifecycle:save_then_continue", (TP_EP, "minimax_m2", True))]
JOBS[1] += [RankJob(CONVERTED, "tests.train.starting:export_each", (("minimax_m2 tp2",), "minimax_m2"), late=True)]
NAMES = [name for cases in CASES.values() for name in cases]


@pytest.mark.parametrize("name", NAMES)
def test_equals_hf(name: str, results: Results) -> None:
    assert_equals_hf(comparison(results, name), BOUND)


@pytest.mark.parametrize("fault", FAULTS)
def test_an_injected_fault_exceeds_the_bound(fault: str, results: Results) -> None:
    errors = comparison(results, fault)
    assert max(errors.worst, errors.score) > 100 * BOUND, errors


@pytest.mark.parametrize("name", ROUND_TRIP)
def test_loaded_weights_are_exported_bit_for_bit(name: str, models: dict[str, Path], results: Results) -> None:
    assert_same_tensors(results[name][0], models[ROUND_TRIP[name][0]])


def test_a_checkpoint_of_two_ranks_converts_on_one(results: Results, scratch: Path) -> None:
    """The export of one rank joins norms over all heads, which tensor parallel ranks save in parts."""
    (converted,) = results[CONVERTED][0].values()
    assert_same_tensors(converted, scratch / SAVED.replace(" ", "_") / "hf")


@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize("kind", KINDS)
def test_shards_merge_to_the_hf_tensors(models: dict[str, Path], kind: str, tp: int) -> None:
    assert_shards_merge(family_of(models[kind], kind, tp), models[kind], tp)


def test_mimo_is_chosen_by_the_model_type_of_its_folder(models: dict[str, Path]) -> None:
    config = HFFolder(models["mimo"]).config()
    assert type(config).model_type == "qwen2"
    assert type(choose_family(make_spec(models["mimo"], Layout()), config)) is Mimo


@pytest.mark.parametrize(
    ("kind", "change", "message"),
    [
        ("mimo", {"attention_bias": False}, "attention_bias=False of a mimo model"),
        ("minimax_m2", {"attn_type_list": [1, 0]}, "attn_type_list with 0 of a minimax_m2 model"),
        ("minimax_m2", {"qk_norm_type": "per_head"}, "qk_norm_type='per_head' of a minimax_m2 model"),
        ("minimax_m2", {"shared_intermediate_size": 8}, "shared_intermediate_size=8 of a minimax_m2 model"),
        ("minimax_m2", {"use_routing_bias": False}, "use_routing_bias=False of a minimax_m2 model"),
    ],
)
def test_an_unsupported_variant_is_refused(
    models: dict[str, Path], kind: str, change: dict[str, Any], message: str
) -> None:
    assert_refused(models[kind], kind, 1, change, message)
