"""Qwen3.5 and Qwen3-Next without experts: loss, every gradient and logprobs equal transformers' in every layout.

The models are float32, with one block of gated attention, three of Gated DeltaNet with grouped value heads, and partial
rotary embeddings. The rows are ragged and packed. transformers gets one sequence at a time, because its delta rule
ignores the borders of packed sequences.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from slime_like.config.schema.resolved import Layout
from tests.train.jobs import SP, RankJob, Results
from tests.train.lifecycle import ExportedWeights
from tests.train.options import OVERLAP
from tests.train.parity import comparison
from tests.train.weights import (
    assert_hf_agrees,
    assert_refused,
    assert_same_tensors,
    assert_shards_merge,
    family_of,
    tensors_of,
)

pytestmark = pytest.mark.ranks

BOUND = 1e-5
DECAY_BOUND = 3e-4  # the error of transformers in float32 against float64 is as large
KINDS = {"qwen3_5": "qwen3_5", "qwen3_next": "qwen3_next", "vision": "qwen3_5"}
RECOMPUTE: dict[str, dict[str, Any]] = {
    "full recompute": {"recompute": "full"},
    "selective recompute": {"recompute": "selective", "recompute_modules": ["core_attn", "layernorm", "mlp"]},
}
BOTH = ("qwen3_5", "qwen3_next")
CASES: dict[int, dict[str, tuple[tuple[str, ...], Layout, dict[str, Any]]]] = {
    1: {"single": ((*BOTH, "vision"), Layout(), {})},
    2: {
        "tp2 sp": ((*BOTH, "vision"), Layout(**SP), {}),
        "tp2": (BOTH, Layout(tp=2), {}),
        "pp2": (BOTH, Layout(pp=2), {}),
        "dp2": (BOTH, Layout(dp=2), {}),
        "cp2": (BOTH, Layout(cp=2), {}),
        "pp2 vpp2": (("qwen3_5",), Layout(pp=2, vpp=2), {}),
        **{f"tp2 sp {name}": (("qwen3_5",), Layout(**SP), keys) for name, keys in RECOMPUTE.items()},
        "cp2 full recompute": (("qwen3_next",), Layout(cp=2), RECOMPUTE["full recompute"]),
    },
    4: {
        "tp2 cp2": (("qwen3_5",), Layout(tp=2, cp=2), {}),
        "tp2 cp2 sp": (BOTH, Layout(cp=2, **SP), {}),
        "cp4": (("qwen3_next",), Layout(cp=4), {}),
    },
}
FAULTS = {
    "unsummed_head_norm": Layout(tp=2),
    "unordered_ranks": Layout(cp=2),
    "convolution_across_borders": Layout(dp=2),
}
SOURCES = {1: {"hybrid save single": Layout()}, 2: {"hybrid save tp2": Layout(**SP)}}
TARGETS = {"hybrid resume tp2": Layout(**SP), "hybrid resume dp2": Layout(dp=2), "hybrid resume cp2": Layout(cp=2)}
SAVED = tuple(name for layouts in SOURCES.values() for name in layouts)
ROUND_TRIP = {
    f"hybrid round trip {kind} {name}": (kind, layout)
    for kind in KINDS
    for name, layout in (("tp2", Layout(**SP)), ("pp2", Layout(pp=2)))
}
NORMS, UPSTREAM = "hybrid norms", "hybrid upstream"
SMALL: dict[str, Any] = {**OVERLAP, "bucket_size": 1_000}  # puts the convolution in a separate bucket
OVERLAPS = {
    "hybrid no overlap": (Layout(dp=2), False),
    "hybrid overlap": (Layout(dp=2, **SMALL), False),
    "hybrid overlap, read early": (Layout(dp=2, **SMALL), True),
}
EXPORTS = {
    "hybrid export": ("vision", Layout(**SP)),
    "hybrid export next": ("qwen3_next experts", Layout(dp=2, ep=2)),
}
CARRIED = {"vision": ("mtp.", "model.visual."), "qwen3_next experts": ("mtp.",)}
HALF = {"hybrid half dp2": Layout(dp=2), "hybrid half tp2": Layout(**SP)}


def jobs() -> dict[int, list[RankJob]]:
    out: dict[int, list[RankJob]] = {}
    for size, cases in CASES.items():
        out[size] = [
            RankJob(f"{kind} {name}", "tests.train.parity:compare", (kind, layout, keys, None))
            for name, (kinds, layout, keys) in cases.items()
            for kind in kinds
        ]
    for size, layouts in SOURCES.items():
        out[size] += [RankJob(name, "tests.train.hybrid:save", ("qwen3_5", layout)) for name, layout in layouts.items()]
    out[1] += [
        RankJob(NORMS, "tests.train.hybrid:half_norms"),
        RankJob(UPSTREAM, "tests.train.hybrid:upstream", ("qwen3_next",)),
    ]
    out[2] += [
        *(RankJob(f, "tests.train.parity:compare", ("qwen3_5", layout, {}, f)) for f, layout in FAULTS.items()),
        *(RankJob(name, "tests.train.hybrid:resume", ("qwen3_5", SAVED, layout)) for name, layout in TARGETS.items()),
        *(RankJob(name, "tests.train.lifecycle:round_trip", case) for name, case in ROUND_TRIP.items()),
        *(RankJob(name, "tests.train.hybrid:half", ("qwen3_next", layout)) for name, layout in HALF.items()),
        *(RankJob(name, "tests.train.hybrid:overlap", ("qwen3_next", *case)) for name, case in OVERLAPS.items()),
        *(RankJob(name, "tests.train.lifecycle:export", (*case, 40_000)) for name, case in EXPORTS.items()),
    ]
    return out


JOBS = jobs()
NAMES = [job.name for size in CASES for job in JOBS[size] if job.target.endswith("compare") and job.name not in FAULTS]


@pytest.mark.parametrize("name", NAMES)
def test_equals_hf(name: str, results: Results) -> None:
    errors = comparison(results, name)
    assert errors.worst <= BOUND, errors
    assert errors.score <= BOUND, errors
    assert errors.decay <= DECAY_BOUND, errors


@pytest.mark.parametrize("kind", KINDS)
def test_logits_equal_hf(kind: str, results: Results) -> None:
    errors = comparison(results, f"{kind} single")
    assert errors.logits is not None and errors.logits <= BOUND, errors


@pytest.mark.parametrize("fault", FAULTS)
def test_an_injected_fault_exceeds_the_bound(fault: str, results: Results) -> None:
    errors = comparison(results, fault)
    assert max(errors.worst, errors.score) > 100 * BOUND, errors


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("source", SAVED)
def test_another_layout_continues_the_run(source: str, target: str, results: Results) -> None:
    (expected,) = [losses for losses in results[source] if losses[0] is not None]
    (losses_here,) = [losses[source] for losses in results[target] if losses[source][0] is not None]
    assert losses_here == pytest.approx(expected, rel=1e-6)
    assert expected[0] != pytest.approx(expected[1], rel=1e-3)  # so the comparison detects lost state


@pytest.mark.parametrize("name", HALF)
def test_decays_are_float32_in_a_16_bit_model(name: str, results: Results) -> None:
    for result in results[name]:
        assert result["dtypes"] == {"torch.float32"} and result["others"] == {"torch.bfloat16"}
        assert 0 < result["moved"] < 1e-4  # smaller than the resolution of bfloat16
        assert not result["rounded"]
        assert result["exported"] == {"float32"}
        assert result["loaded"] and result["continues"]


def test_overlap_changes_nothing(results: Results) -> None:
    plain, overlapped, unsynced = (results[name] for name in OVERLAPS)
    assert overlapped == plain and all(len(weights) == 2 for weights in overlapped)
    assert unsynced != plain


def test_megatron_fails_without_our_patches(results: Results) -> None:
    (outcomes,) = results[UPSTREAM]
    assert outcomes == {"ours": "ok", "groups of two dtypes": "RuntimeError", "no fla": "ImportError"}


def test_norms_of_16_bits_round_once_and_save_16_bits(results: Results) -> None:
    (errors_of,) = results[NORMS]
    assert errors_of.keys() == {"zero-centred", "gated"}
    for errors in errors_of.values():
        assert errors["error"] < 5e-3, errors_of  # half a last bit of bfloat16 is 3.9e-3
        assert errors["wide bytes"] <= 4 * 48, errors_of  # only the scale


# ---- weights ---------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("name", ROUND_TRIP)
def test_loaded_weights_are_exported_bit_for_bit(name: str, models: dict[str, Path], results: Results) -> None:
    assert_same_tensors(results[name][0], models[ROUND_TRIP[name][0]])


@pytest.mark.parametrize("name", EXPORTS)
def test_untrained_tensors_are_exported_but_not_sent_to_engines(
    name: str, models: dict[str, Path], results: Results
) -> None:
    exported: list[ExportedWeights] = results[name]
    kind = EXPORTS[name][0]
    before, after = tensors_of(models[kind]), tensors_of(exported[0].folder)
    carried_names = {name for name in before if name.startswith(CARRIED[kind])}
    assert all(any(name.startswith(prefix) for name in carried_names) for prefix in CARRIED[kind])
    trained_names = before.keys() - carried_names
    assert len(trained_names) > 40
    assert {name for e in exported for bucket in e.buckets for name, _, _ in bucket} == trained_names
    assert after.keys() == before.keys()
    assert all(
        torch.equal(after[name], before[name]) and after[name].dtype == before[name].dtype for name in carried_names
    )
    assert not any(torch.equal(after[name], before[name]) for name in trained_names if name.endswith("proj.weight"))


@pytest.mark.parametrize("name", EXPORTS)
def test_hf_loads_the_export_and_agrees(name: str, results: Results) -> None:
    assert_hf_agrees(results[name])


@pytest.mark.parametrize("tp", [1, 2, 4])
@pytest.mark.parametrize("kind", KINDS)
def test_shards_merge_to_the_hf_tensors(models: dict[str, Path], kind: str, tp: int) -> None:
    # Four ranks do not divide two key-value heads, only the heads of the DeltaNets.
    family = family_of(models[kind], KINDS[kind], min(tp, 2))
    assert_shards_merge(family, models[kind], tp, only="linear_attn" if tp == 4 else "")


@pytest.mark.parametrize(
    ("kind", "change", "message"),
    [
        ("qwen3_5", {"attention_bias": True}, "attention_bias=True of a qwen3_5_text model is not supported"),
        ("qwen3_5", {"attn_output_gate": False}, "attn_output_gate=False of a qwen3_5_text model"),
        ("qwen3_5", {"hidden_act": "gelu"}, "hidden_act='gelu' of a qwen3_5_text model"),
        ("qwen3_next", {"layer_types": ["full_attention", "mamba"] * 2}, "layer_types with 'mamba' of a qwen3_next"),
        ("qwen3_5", {"linear_num_key_heads": 3}, "parallel.tp=2 does not divide the model's linear_num_key_heads=3"),
    ],
)
def test_an_unsupported_variant_is_refused(
    models: dict[str, Path], kind: str, change: dict[str, Any], message: str
) -> None:
    assert_refused(models[kind], KINDS[kind], 2, change, message)
