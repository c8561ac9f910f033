"""Options of the trainer: recompute, overlap, bfloat16 with float32 main weights, schedules, AdamW, offload."""

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
from tests.train.jobs import SP, RankJob, Results
from tests.train.options import ADAMW, OVERLAP, Overlapped, Rounded

pytestmark = pytest.mark.ranks

NUM_MICROS, NUM_BLOCKS = 2, 4
VARIANTS: dict[str, dict[str, Any]] = {
    "full": {"recompute": "full"},
    "full, stretches of 2": {"recompute": "full", "recompute_num_layers": 2},
    "full, first block": {"recompute": "full", "recompute_method": "block", "recompute_num_layers": 1},
    "core_attn": {"recompute": "selective", "recompute_modules": ["core_attn"]},
    "mlp": {"recompute": "selective", "recompute_modules": ["mlp"]},
    "layernorm": {"recompute": "selective", "recompute_modules": ["layernorm"]},
    "all three": {"recompute": "selective", "recompute_modules": ["core_attn", "mlp", "layernorm"]},
}
C_VARIANTS = ("full", "all three")  # variants that also run with the C kernels
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
CP, LENGTHS = (1, 2, 4), (5, 3, 9)  # layouts and sequences of the test of TransformerEngine's inputs
HALF = {"bfloat16 tp2 sp": Layout(**SP), "bfloat16 dp2": Layout(dp=2)}
NEAR: dict[int, dict[str, Layout]] = {
    2: {"tp2 sp": Layout(**SP), "dp2": Layout(dp=2), "cp2": Layout(cp=2), "pp2 vpp2": Layout(pp=2, vpp=2)},
    4: {"tp2 cp2": Layout(cp=2, **SP), "dp2 cp2": Layout(dp=2, cp=2)},
}
RECOMPUTED: dict[str, dict[str, Any]] = {"": {}, ", recompute": {"recompute": "full"}}
SPARSE = {
    "bfloat16 ep2": Layout(dp=2, ep=2)
}  # gradients are not compared: rounding routes some tokens to other experts
OPTIONS = "tests.train.options"
NEAR_JOBS = {
    size: [
        RankJob(f"bfloat16 near {name}{suffix}", f"{OPTIONS}:near", (layout, "tied", model))
        for name, layout in layouts.items()
        for suffix, model in RECOMPUTED.items()
    ]
    for size, layouts in NEAR.items()
}
JOBS = {
    1: [
        RankJob("schedules", f"{OPTIONS}:schedules", (LEARNING, NUM_STEPS)),
        RankJob("adamw float64", f"{OPTIONS}:adamw"),
        RankJob("cpu kernels", f"{OPTIONS}:cpu_kernels"),
        RankJob("te", "tests.train.te:on_cpu", (CP, LENGTHS)),
    ],
    2: [
        *(RankJob(name, f"{OPTIONS}:recompute", (layout, VARIANTS, "torch")) for name, layout in RECOMPUTE.items()),
        RankJob(
            "recompute c",
            f"{OPTIONS}:recompute",
            (Layout(**SP), {n: VARIANTS[n] for n in C_VARIANTS}, "auto"),
        ),
        *(
            RankJob(f"no overlap {kind}", f"{OPTIONS}:overlap", (kind, Layout(dp=2), None))
            for kind in ("tied", "untied")
        ),
        *(RankJob(f"overlap {kind}", f"{OPTIONS}:overlap", (kind, OVERLAPPED, None)) for kind in ("tied", "untied")),
        *(
            RankJob(fault, f"{OPTIONS}:overlap", ("untied", OVERLAPPED, fault))
            for fault in ("weights are read early", "output layer does not wait")
        ),
        *NEAR_JOBS[2],
        *(RankJob(f"{name} near", f"{OPTIONS}:near", (layout, "qwen3_moe")) for name, layout in SPARSE.items()),
        *(RankJob(name, f"{OPTIONS}:bfloat16", (layout,)) for name, layout in HALF.items()),
        *(RankJob(name, f"{OPTIONS}:bfloat16", (layout, "qwen3_moe")) for name, layout in SPARSE.items()),
        RankJob("offload half", f"{OPTIONS}:offload", (Layout(dp=2), 0.5)),
        RankJob("offload all", f"{OPTIONS}:offload", (Layout(dp=2), 1.0)),
    ],
    4: [
        *NEAR_JOBS[4],
        RankJob("no overlap vpp2", f"{OPTIONS}:overlap", ("untied", VPP, None)),
        RankJob("overlap vpp2", f"{OPTIONS}:overlap", ("untied", replace(VPP, **OVERLAP), None)),
        RankJob(
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
        assert rank.keys() == {"none", *(VARIANTS if name in RECOMPUTE else C_VARIANTS)}
        assert {variant: recomputed.error for variant, recomputed in rank.items() if recomputed.error > 1e-6} == {}


@pytest.mark.parametrize("name", RECOMPUTE)
def test_recompute_repeats_only_the_named_modules(name: str, results: Results) -> None:
    blocks = NUM_BLOCKS // RECOMPUTE[name].pp
    for rank in results[name]:
        calls = {variant: recomputed.calls for variant, recomputed in rank.items()}
        once = calls["none"]
        assert once["core_attn"] == once["mlp"] == blocks * NUM_MICROS
        norms = once["layernorm"]
        per_block = 4 * NUM_MICROS  # two before attention and MLP, two on heads
        assert norms in (blocks * per_block, blocks * per_block + NUM_MICROS)  # the last stage has the final norm
        repeats = {"core_attn": 2 * once["core_attn"], "mlp": 2 * once["mlp"]}
        assert calls["full"] == calls["full, stretches of 2"] == repeats | {"layernorm": norms + blocks * per_block}
        first = {"core_attn": once["core_attn"] + NUM_MICROS, "mlp": once["mlp"] + NUM_MICROS}
        assert calls["full, first block"] == first | {"layernorm": norms + per_block}
        assert calls["core_attn"] == once | {"core_attn": repeats["core_attn"]}
        assert calls["mlp"] == once | {"mlp": repeats["mlp"]}
        assert calls["layernorm"] == once | {"layernorm": norms + 2 * blocks * NUM_MICROS}
        assert calls["all three"] == repeats | {"layernorm": norms + 2 * blocks * NUM_MICROS}


# ---- overlap ---------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("kind", ["tied", "untied"])
def test_overlap_changes_nothing(kind: str, results: Results) -> None:
    for plain, overlapped in zip(results[f"no overlap {kind}"], results[f"overlap {kind}"], strict=True):
        assert isinstance(overlapped, Overlapped)
        assert overlapped.weights == plain.weights
        assert np.array_equal(overlapped.score, plain.score)
        assert plain.num_early == 0
        assert overlapped.buckets > 3 and overlapped.num_early > 3


def test_overlap_changes_nothing_on_virtual_stages(results: Results) -> None:
    for plain, overlapped in zip(results["no overlap vpp2"], results["overlap vpp2"], strict=True):
        assert overlapped.weights == plain.weights
        assert np.array_equal(overlapped.score, plain.score)
        assert plain.num_early == 0
        assert (
            overlapped.num_early > overlapped.buckets >= 2
        )  # in every optimizer step except the first, in which megatron records the order
        assert all(overlapped.gathered_at_read)
    assert any(overlapped.gathered_at_read for overlapped in results["overlap vpp2"])
    assert (
        max(overlapped.buckets for overlapped in results["overlap vpp2"]) > 2
    )  # first virtual stage of the first rank
    unsynced = results["overlap vpp2, read early"]
    assert any(a.weights != b.weights for a, b in zip(results["no overlap vpp2"], unsynced, strict=True))


def test_ranks_agree_on_their_weights(results: Results) -> None:
    first, second = results["overlap untied"]
    assert first.weights == second.weights


def test_reading_weights_without_the_gather_is_detected(results: Results) -> None:
    plain, unsynced = results["no overlap untied"], results["weights are read early"]
    assert any(a.weights != b.weights for a, b in zip(plain, unsynced, strict=True))


def test_the_output_layer_waits_for_its_weight(results: Results) -> None:
    for rank in (*results["overlap tied"], *results["overlap untied"]):
        assert rank.gathered_at_read and all(rank.gathered_at_read)
    assert not all(
        was_gathered for rank in results["output layer does not wait"] for was_gathered in rank.gathered_at_read
    )


# ---- bfloat16 --------------------------------------------------------------------------------------------------------
def reported_score(ranks: list[Rounded]) -> tuple[float, float]:
    """Return mean and largest log-probability difference, from the reporter."""
    (score,) = [rank.score for rank in ranks if rank.score]
    return score


@pytest.mark.parametrize("name", [job.name for jobs in NEAR_JOBS.values() for job in jobs])
def test_bfloat16_stays_near_the_float32_reference(name: str, results: Results) -> None:
    assert max(rank.grad for rank in results[name]) < 0.08, results[name]
    mean, largest = reported_score(results[name])
    assert mean < 0.01 and largest < 0.05, (mean, largest)


@pytest.mark.parametrize("name", SPARSE)
def test_bfloat16_experts_stay_near_the_reference(name: str, results: Results) -> None:
    mean, largest = reported_score(results[f"{name} near"])
    assert mean < 0.01 and largest < 0.2, (mean, largest)


@pytest.mark.parametrize("name", [*HALF, *SPARSE])
def test_main_weights_and_gradients_are_float32(name: str, results: Results) -> None:
    for rank in results[name]:
        assert rank["dtypes"] == {("torch.bfloat16", "torch.float32")}  # weights, accumulated gradients
        assert rank["main dtypes"] == {"torch.float32"}
        assert rank["sent"] == {"bfloat16"}
        assert rank["main weights moved"] > 2e-6  # the sum of three updates that are too small for bfloat16
        assert rank["resumed exactly"]


# ---- schedules and AdamW ---------------------------------------------------------------------------------------------
def closed_form(keys: dict[str, Any], k: int) -> float:
    """Return the learning rate of optimizer step ``k``, counted from 1."""
    top, low = keys["lr"], keys.get("min_lr", 0.0)
    end = keys.get("decay_steps", NUM_STEPS)
    warmup = keys.get("warmup_steps") or round(keys.get("warmup_fraction", 0.0) * end)
    if k <= warmup:
        return top * k / warmup
    progress = min(1.0, (k - warmup) / (end - warmup))
    shapes = {
        "constant": lambda x: 1.0,
        "linear": lambda x: 1 - x,
        "cosine": lambda x: (1 + math.cos(math.pi * x)) / 2,
        "exponential": lambda x: 2 * 0.5**x - 1,
        "minus_sqrt": lambda x: 1 - math.sqrt(x),
    }
    shape = keys.get("schedule", "constant")
    if shape == "wsd":
        shape, progress = (
            keys["wsd_decay_style"],
            max(0.0, (k - end + keys["wsd_decay_steps"]) / keys["wsd_decay_steps"]),
        )
    return low + (top - low) * shapes[shape](progress)


@pytest.mark.parametrize("name", LEARNING)
def test_learning_rates_follow_the_closed_form(name: str, results: Results) -> None:
    (rates_of,) = results["schedules"]
    expected = [closed_form(LEARNING[name], k) for k in range(1, NUM_STEPS + 1)]
    assert rates_of[name] == pytest.approx(expected, rel=1e-12)
    if name != "constant":
        assert rates_of[name][-1] == pytest.approx(LEARNING[name]["min_lr"])


def test_adamw_with_clipping_and_decay_equals_float64(results: Results) -> None:
    (errors,) = results["adamw float64"]
    assert errors["largest norm"] > 2 * ADAMW["clip_grad"]  # gradients were clipped
    assert errors["norm"] < 1e-5
    assert errors["rate"] < 1e-9  # the learning rate that a step reports is the one it used
    assert errors["vectors"] < 1e-6 and errors["matrices"] < 1e-6, errors


# ---- optimizer offload -----------------------------------------------------------------------------------------------
@pytest.mark.parametrize("name", ["offload half", "offload all"])
def test_offload_does_not_change_the_optimizer(name: str, results: Results) -> None:
    """megatron divides the parameters; here the part for the GPU stays on the CPU (test_gpu uses a GPU)."""
    for rank in results[name]:
        assert rank["host"] > 0
        assert (rank["device"] > 0) == (name == "offload half")
        assert rank["equal"] and rank["restored"] and rank["resumed"], rank


# ---- TransformerEngine's attention (its results: test_gpu) -----------------------------------------------------------
@pytest.mark.parametrize("cp", CP)
def test_transformer_engine_is_given_the_same_sequences(cp: int, results: Results) -> None:
    (result,) = results["te"]
    unit = 2 * cp if cp > 1 else 1
    lengths = [-(-length // unit) * unit for length in LENGTHS]
    for rank in range(cp):
        parameters = result["parameters"][cp, rank]
        bounds = np.cumsum([0, *lengths, parameters["tokens"] - sum(lengths)])
        assert parameters["cu_seqlens_q"].tolist() == parameters["cu_seqlens_kv"].tolist() == np.unique(bounds).tolist()
        assert parameters["cu_seqlens_q"].dtype == np.int32
        assert parameters["max_seqlen_q"] == parameters["max_seqlen_kv"] == np.diff(bounds).max()
        assert (parameters["qkv_format"], parameters["pad_between_seqs"]) == ("thd", False)
        padded = parameters["cu_seqlens_q_padded"], parameters["cu_seqlens_kv_padded"]
        assert all(p is None if cp == 1 else p.tolist() == parameters["cu_seqlens_q"].tolist() for p in padded)
        if cp > 1:  # TransformerEngine expects chunks r and 2 * cp - 1 - r of every sequence
            chunks = [np.split(np.arange(a, b), 2 * cp) for a, b in itertools.pairwise(np.unique(bounds))]
            local_tokens = np.concatenate(
                [part for split in chunks for part in (split[rank], split[2 * cp - 1 - rank])]
            )
            assert parameters["local_index"].tolist() == local_tokens.tolist()


@pytest.mark.skipif(not any(shutil.which(name) for name in COMPILERS), reason="no C compiler")
def test_c_kernels_are_used_on_a_cpu_with_a_compiler(results: Results) -> None:
    (norms,) = results["cpu kernels"]
    assert (norms["compiler, auto"], norms["compiler, c"], norms["compiler, torch"]) == ("FusedRMSNorm",) * 2 + (
        "RMSNorm",
    )
    assert norms["none, auto"] == norms["none, torch"] == "RMSNorm"
    assert norms["none, c"].startswith("model.cpu_kernels=c: no C compiler (")
    assert norms["none, c"].endswith("on PATH: apt-get install gcc; to train with torch, set model.cpu_kernels=auto")


def test_te_attention_without_transformer_engine_is_a_config_error(results: Results) -> None:
    (result,) = results["te"]
    if importlib.util.find_spec("transformer_engine") is not None:
        pytest.skip("transformer_engine is installed")
    assert "model.attention=te" in result["refusal"] and "model.attention=auto" in result["refusal"]
