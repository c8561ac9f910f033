"""The trainer's options: recompute, overlap, bfloat16 with float32 main weights, schedules, AdamW, optimizer offload."""

from __future__ import annotations

import importlib.util
import itertools
import math
import shutil
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from slime_like.config.schema.resolved import Layout
from slime_like_plugins.sglang_cpu.build import COMPILERS
from tests.train.jobs import SP, Job, Results
from tests.train.options import ADAMW, OVERLAP, Overlapped, Recomputed, Rounded

pytestmark = pytest.mark.ranks

MICROS, BLOCKS = 2, 4  # of the batch and the model
VARIANTS: dict[str, dict[str, Any]] = {
    "full": {"recompute": "full"},
    "full, stretches of 2": {"recompute": "full", "recompute_num_layers": 2},
    "full, first block": {"recompute": "full", "recompute_method": "block", "recompute_num_layers": 1},
    "core_attn": {"recompute": "selective", "recompute_modules": ["core_attn"]},
    "mlp": {"recompute": "selective", "recompute_modules": ["mlp"]},
    "layernorm": {"recompute": "selective", "recompute_modules": ["layernorm"]},
    "all three": {"recompute": "selective", "recompute_modules": ["core_attn", "mlp", "layernorm"]},
}
RECOMPUTE = {"recompute tp2 sp": Layout(**SP), "recompute pp2": Layout(pp=2)}
OVERLAPPED = Layout(dp=2, **OVERLAP)
VPP = Layout(dp=2, pp=2, vpp=2)
LEARNING: dict[str, dict[str, Any]] = {
    "constant": {"lr": 2e-3, "warmup_steps": 7},
    "linear": {"lr": 2e-3, "min_lr": 3e-4, "schedule": "linear", "warmup_steps": 5},
    "cosine": {"lr": 2e-3, "min_lr": 3e-4, "schedule": "cosine", "warmup_fraction": 0.1},
    "cosine, short": {"lr": 2e-3, "min_lr": 3e-4, "schedule": "cosine", "warmup_steps": 3, "decay_steps": 30},
    **{
        f"wsd {style}": {
            "lr": 2e-3,
            "min_lr": 3e-4,
            "schedule": "wsd",
            "warmup_steps": 4,
            "wsd_decay_steps": 12,
            "wsd_decay_style": style,
        }
        for style in ("exponential", "linear", "cosine", "minus_sqrt")
    },
}
NUM_STEPS = 40
CP, LENGTHS = (1, 2, 4), (5, 3, 9)  # of what TransformerEngine would be given
HALF = {"bfloat16 tp2 sp": Layout(**SP), "bfloat16 dp2": Layout(dp=2)}
NEAR: dict[int, dict[str, Layout]] = {
    2: {"tp2 sp": Layout(**SP), "dp2": Layout(dp=2), "cp2": Layout(cp=2), "pp2 vpp2": Layout(pp=2, vpp=2)},
    4: {"tp2 cp2": Layout(cp=2, **SP), "dp2 cp2": Layout(dp=2, cp=2)},
}
RECOMPUTED: dict[str, dict[str, Any]] = {"": {}, ", recompute": {"recompute": "full"}}
SPARSE = {
    "bfloat16 ep2": Layout(dp=2, ep=2)
}  # rounding sends some tokens to other experts, whose gradients are then others
OPTIONS = "tests.train.options"
NEAR_JOBS = {
    size: [
        Job(f"bfloat16 near {name}{suffix}", f"{OPTIONS}:near", (layout, "tied", model))
        for name, layout in layouts.items()
        for suffix, model in RECOMPUTED.items()
    ]
    for size, layouts in NEAR.items()
}
JOBS = {
    1: [
        Job("schedules", f"{OPTIONS}:schedules", (LEARNING, NUM_STEPS)),
        Job("adamw float64", f"{OPTIONS}:adamw"),
        Job("cpu kernels", f"{OPTIONS}:cpu_kernels"),
        Job("te", "tests.train.te:on_cpu", (CP, LENGTHS)),
    ],
    2: [
        *(Job(name, f"{OPTIONS}:recompute", (layout, VARIANTS, "torch")) for name, layout in RECOMPUTE.items()),
        Job(
            "recompute c",
            f"{OPTIONS}:recompute",
            (Layout(**SP), {n: VARIANTS[n] for n in ("full", "all three")}, "auto"),
        ),
        *(Job(f"no overlap {kind}", f"{OPTIONS}:overlap", (kind, Layout(dp=2), None)) for kind in ("tied", "untied")),
        *(Job(f"overlap {kind}", f"{OPTIONS}:overlap", (kind, OVERLAPPED, None)) for kind in ("tied", "untied")),
        *(
            Job(fault, f"{OPTIONS}:overlap", ("untied", OVERLAPPED, fault))
            for fault in ("weights are read early", "output layer does not wait")
        ),
        *NEAR_JOBS[2],
        *(Job(f"{name} near", f"{OPTIONS}:near", (layout, "qwen3_moe")) for name, layout in SPARSE.items()),
        *(Job(name, f"{OPTIONS}:bfloat16", (layout,)) for name, layout in HALF.items()),
        *(Job(name, f"{OPTIONS}:bfloat16", (layout, "qwen3_moe")) for name, layout in SPARSE.items()),
        Job("offload half", f"{OPTIONS}:offload", (Layout(dp=2), 0.5)),
        Job("offload all", f"{OPTIONS}:offload", (Layout(dp=2), 1.0)),
    ],
    4: [
        *NEAR_JOBS[4],
        Job("no overlap vpp2", f"{OPTIONS}:overlap", ("untied", VPP, None)),
        Job("overlap vpp2", f"{OPTIONS}:overlap", ("untied", replace(VPP, **OVERLAP), None)),
        Job(
            "overlap vpp2, read early",
            f"{OPTIONS}:overlap",
            ("untied", replace(VPP, **OVERLAP), "weights are read early"),
        ),
    ],
}


# ---- recompute -------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("name", [*RECOMPUTE, "recompute c"])
def test_recompute_changes_no_gradient(name: str, results: Results) -> None:
    for rank in results[name]:
        assert {variant: found.error for variant, found in rank.items() if found.error > 1e-6} == {}


@pytest.mark.parametrize("name", RECOMPUTE)
def test_recompute_runs_again_what_it_names_and_nothing_else(name: str, results: Results) -> None:
    blocks = BLOCKS // RECOMPUTE[name].pp
    for rank in results[name]:
        calls = {variant: found.calls for variant, found in rank.items()}
        once = calls["none"]
        assert once["core_attn"] == once["mlp"] == blocks * MICROS
        norms = once["layernorm"]
        per_block = 4 * MICROS  # two before attention and MLP, two on heads
        assert norms in (blocks * per_block, blocks * per_block + MICROS)  # the last stage has one more, at the end
        both = {"core_attn": 2 * once["core_attn"], "mlp": 2 * once["mlp"]}
        assert calls["full"] == calls["full, stretches of 2"] == both | {"layernorm": norms + blocks * per_block}
        first = {"core_attn": once["core_attn"] + MICROS, "mlp": once["mlp"] + MICROS}
        assert calls["full, first block"] == first | {"layernorm": norms + per_block}
        assert calls["core_attn"] == once | {"core_attn": both["core_attn"]}
        assert calls["mlp"] == once | {"mlp": both["mlp"]}
        assert calls["layernorm"] == once | {"layernorm": norms + 2 * blocks * MICROS}
        assert calls["all three"] == both | {"layernorm": norms + 2 * blocks * MICROS}


# ---- overlap ---------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("kind", ["tied", "untied"])
def test_overlap_changes_nothing(kind: str, results: Results) -> None:
    for plain, found in zip(results[f"no overlap {kind}"], results[f"overlap {kind}"], strict=True):
        assert isinstance(found, Overlapped)
        assert found.weights == plain.weights
        assert np.array_equal(found.score, plain.score)
        assert plain.early == 0
        assert found.buckets > 3 and found.early > 3


def test_overlap_changes_nothing_on_virtual_stages(results: Results) -> None:
    for plain, found in zip(results["no overlap vpp2"], results["overlap vpp2"], strict=True):
        assert found.weights == plain.weights
        assert np.array_equal(found.score, plain.score)
        assert plain.early == 0
        assert found.early > found.buckets >= 2  # in every step but the first, which learns what to wait for
        assert all(found.waited)
    assert any(found.waited for found in results["overlap vpp2"])
    assert max(found.buckets for found in results["overlap vpp2"]) > 2  # first virtual stage of the first rank
    early = results["overlap vpp2, read early"]
    assert any(a.weights != b.weights for a, b in zip(results["no overlap vpp2"], early, strict=True))


def test_ranks_agree_on_their_weights(results: Results) -> None:
    first, second = results["overlap untied"]
    assert first.weights == second.weights


def test_export_would_read_old_weights_without_waiting(results: Results) -> None:
    plain, found = results["no overlap untied"], results["weights are read early"]
    assert any(a.weights != b.weights for a, b in zip(plain, found, strict=True))


def test_the_output_layer_waits_for_its_weight(results: Results) -> None:
    for rank in (*results["overlap tied"], *results["overlap untied"]):
        assert rank.waited and all(rank.waited)
    assert not all(rank_waited for rank in results["output layer does not wait"] for rank_waited in rank.waited)


# ---- bfloat16 --------------------------------------------------------------------------------------------------------
def reported(ranks: list[Rounded]) -> tuple[float, float]:
    """Mean and largest difference of a log-probability: of the one rank that has them."""
    (score,) = [rank.score for rank in ranks if rank.score]
    return score


@pytest.mark.parametrize("name", [job.name for jobs in NEAR_JOBS.values() for job in jobs])
def test_bfloat16_stays_near_the_float32_reference(name: str, results: Results) -> None:
    assert max(rank.grad for rank in results[name]) < 0.08, results[name]
    mean, largest = reported(results[name])
    assert mean < 0.01 and largest < 0.05, (mean, largest)


@pytest.mark.parametrize("name", SPARSE)
def test_bfloat16_experts_say_nearly_the_same(name: str, results: Results) -> None:
    mean, largest = reported(results[f"{name} near"])
    assert mean < 0.01 and largest < 0.2, (mean, largest)


@pytest.mark.parametrize("name", [*HALF, *SPARSE])
def test_what_must_not_be_rounded_is_float32(name: str, results: Results) -> None:
    for rank in results[name]:
        assert rank["dtypes"] == {("torch.bfloat16", "torch.float32")}  # weights, accumulated gradients
        assert rank["main dtypes"] == {"torch.float32"}
        assert rank["sent"] == {"bfloat16"}
        assert rank["main weights moved"] > 2e-6  # three updates too small for bfloat16 are not lost
        assert rank["resumed exactly"]


# ---- schedules and AdamW ---------------------------------------------------------------------------------------------
def closed_form(keys: dict[str, Any], k: int) -> float:
    """Learning rate of optimizer step ``k``, counted from 1."""
    top, low = keys["lr"], keys.get("min_lr", 0.0)
    end = keys.get("decay_steps", NUM_STEPS)
    warmup = keys.get("warmup_steps") or round(keys.get("warmup_fraction", 0.0) * end)
    if k <= warmup:
        return top * k / warmup
    done = min(1.0, (k - warmup) / (end - warmup))
    shapes = {
        "constant": lambda x: 1.0,
        "linear": lambda x: 1 - x,
        "cosine": lambda x: (1 + math.cos(math.pi * x)) / 2,
        "exponential": lambda x: 2 * 0.5**x - 1,
        "minus_sqrt": lambda x: 1 - math.sqrt(x),
    }
    shape = keys.get("schedule", "constant")
    if shape == "wsd":
        shape, done = keys["wsd_decay_style"], max(0.0, (k - end + keys["wsd_decay_steps"]) / keys["wsd_decay_steps"])
    return low + (top - low) * shapes[shape](done)


@pytest.mark.parametrize("name", LEARNING)
def test_learning_rates_follow_the_closed_form(name: str, results: Results) -> None:
    (found,) = results["schedules"]
    expected = [closed_form(LEARNING[name], k) for k in range(1, NUM_STEPS + 1)]
    assert found[name] == pytest.approx(expected, rel=1e-12)
    if name != "constant":
        assert found[name][-1] == pytest.approx(LEARNING[name]["min_lr"])


def test_adamw_with_clipping_and_decay_equals_float64(results: Results) -> None:
    (found,) = results["adamw float64"]
    assert found["largest norm"] > 2 * ADAMW["clip_grad"]  # clipping had something to do
    assert found["norm"] < 1e-5
    assert found["rate"] < 1e-9  # of the very step that reports it
    assert found["vectors"] < 1e-6 and found["matrices"] < 1e-6, found


# ---- optimizer offload -----------------------------------------------------------------------------------------------
@pytest.mark.parametrize("name", ["offload half", "offload all"])
def test_a_divided_optimizer_is_the_same_optimizer(name: str, results: Results) -> None:
    """The division is megatron's; that the other part is on a GPU is pretended here (test_gpu has the real one)."""
    for rank in results[name]:
        assert rank["host"] > 0
        assert (rank["device"] > 0) == (name == "offload half")
        assert rank["equal"] and rank["restored"] and rank["resumed"], rank


# ---- TransformerEngine's attention (what it computes: test_gpu) ------------------------------------------------------
@pytest.mark.parametrize("cp", CP)
def test_transformer_engine_is_given_the_same_sequences(cp: int, results: Results) -> None:
    (found,) = results["te"]
    unit = 2 * cp if cp > 1 else 1
    lengths = [-(-length // unit) * unit for length in LENGTHS]
    for rank in range(cp):
        given = found["given"][cp, rank]
        bounds = np.cumsum([0, *lengths, given["tokens"] - sum(lengths)])
        assert given["cu_seqlens_q"].tolist() == given["cu_seqlens_kv"].tolist() == np.unique(bounds).tolist()
        assert given["cu_seqlens_q"].dtype == np.int32
        assert given["max_seqlen_q"] == given["max_seqlen_kv"] == np.diff(bounds).max()
        assert (given["qkv_format"], given["pad_between_seqs"]) == ("thd", False)
        padded = given["cu_seqlens_q_padded"], given["cu_seqlens_kv_padded"]
        assert all(p is None if cp == 1 else p.tolist() == given["cu_seqlens_q"].tolist() for p in padded)
        if cp > 1:  # each of its ranks takes chunks r and 2 * cp - 1 - r of every sequence
            chunks = [np.split(np.arange(a, b), 2 * cp) for a, b in itertools.pairwise(np.unique(bounds))]
            mine = np.concatenate([part for split in chunks for part in (split[rank], split[2 * cp - 1 - rank])])
            assert given["local_index"].tolist() == mine.tolist()


@pytest.mark.skipif(not any(shutil.which(name) for name in COMPILERS), reason="no C compiler")
def test_a_trainer_on_a_cpu_takes_c_kernels_where_they_can_be_compiled(results: Results) -> None:
    (found,) = results["cpu kernels"]
    assert (found["compiler, auto"], found["compiler, c"], found["compiler, torch"]) == ("FusedRMSNorm",) * 2 + (
        "RMSNorm",
    )
    assert found["none, auto"] == found["none, torch"] == "RMSNorm"
    assert found["none, c"].startswith("model.cpu_kernels=c: no C compiler (")
    assert found["none, c"].endswith("on PATH: apt-get install gcc; or set it to auto, which does without")


def test_without_transformer_engine_its_attention_says_so(results: Results) -> None:
    (found,) = results["te"]
    if importlib.util.find_spec("transformer_engine") is not None:
        pytest.skip("transformer_engine is installed")
    assert "model.attention=te" in found["refusal"] and "model.attention=auto" in found["refusal"]


def test_results_are_of_their_kind(results: Results) -> None:
    assert all(isinstance(found, Recomputed) for found in results["recompute pp2"][0].values())
