"""Experts: loss, gradients and log-probabilities equal transformers' in every layout; an export equals the loaded
weights bit for bit, and a checkpoint can be resumed with another distribution of the experts."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from slime_like.config.schema.resolved import Layout
from slime_like.errors import CheckpointError
from slime_like.train.megatron.families.experts import ExpertMatrix, global_key, keys_of_peers
from slime_like.train.megatron.families.hf import HFFolder
from tests.train.jobs import SP, RankJob, Results
from tests.train.models import fuse_experts
from tests.train.parity import comparison
from tests.train.weights import assert_refused, assert_same_tensors, family_of, tensors_of

pytestmark = pytest.mark.ranks

BOUND = 1e-5
DECAY_BOUND = 3e-4  # the error of transformers in float32 against float64 is as large
LAYOUTS: dict[int, dict[str, Layout]] = {
    1: {"single": Layout()},
    2: {
        "ep2": Layout(dp=2, ep=2),
        "dp2": Layout(dp=2),
        "tp2 sp": Layout(**SP),
        "tp2 sp ep2": Layout(ep=2, **SP),
        "tp2 sp etp2": Layout(etp=2, **SP),
        "ep2 overlap": Layout(dp=2, ep=2, overlap_grad_reduce=True, overlap_param_gather=True),
        "pp2": Layout(pp=2),
        "pp2 vpp2": Layout(pp=2, vpp=2),
        "cp2": Layout(cp=2),
        "cp2 ep2": Layout(cp=2, ep=2),
    },
    4: {
        "dp4 ep2": Layout(dp=4, ep=2),
        "pp2 tp2 sp ep2": Layout(pp=2, ep=2, **SP),
        "dp2 tp2 sp ep2 etp2": Layout(dp=2, ep=2, etp=2, **SP),
    },
}
HYBRIDS = ("qwen3_next experts", "qwen3_5_moe", "vision experts")
HYBRID_LAYOUTS = {
    "qwen3_next experts": ("single", "ep2", "tp2 sp ep2", "pp2", "cp2 ep2"),
    "qwen3_5_moe": ("single", "ep2"),
    "vision experts": ("single",),
}
CASES: dict[int, dict[str, tuple[str, Layout]]] = {
    size: {
        f"{kind} {name}": (kind, layout)
        for name, layout in layouts.items()
        for kind in ("qwen3_moe", *HYBRIDS)
        if name in HYBRID_LAYOUTS.get(kind, layouts)
    }
    for size, layouts in LAYOUTS.items()
}
RECOMPUTE: dict[str, dict[str, Any]] = {
    "recomputed experts": {"recompute": "selective", "recompute_modules": ["core_attn", "layernorm", "moe"]},
    "recomputed blocks": {"recompute": "full"},
}
FAULTS = {
    "swapped_experts": Layout(dp=2, ep=2),
    "unnormalised_router": Layout(dp=2, ep=2),
    "unreduced_experts": Layout(dp=2),
}
BALANCED = {
    "balanced single": Layout(),
    "balanced ep2": Layout(dp=2, ep=2),
    "balanced tp2 sp": Layout(**SP),
    "balanced cp2 ep2": Layout(cp=2, ep=2),
    "balanced pp2": Layout(pp=2),
}
COEFFICIENT = {"megatron": {"moe_aux_loss_coeff": 0.05}}
SHARDED = "tp2 sp etp2"
ROUND_TRIP = {
    f"round trip {kind} {name}": (kind, LAYOUTS[2][name])
    for kind, name in (
        ("qwen3_moe", "ep2"),
        ("qwen3_moe", "tp2 sp ep2"),
        ("qwen3_moe", "cp2 ep2"),
        ("qwen3_moe", SHARDED),
        ("qwen3_next experts", "tp2 sp ep2"),
        ("qwen3_5_moe", "ep2"),
        ("vision experts", "ep2"),
    )
}
RESHARDED = {name: LAYOUTS[2][name] for name in ("ep2", "dp2", "tp2 sp", "tp2 sp ep2", "pp2")}
SOURCES: dict[str, tuple[str, ...]] = {  # by target
    **{target: tuple(RESHARDED) for target in ("single", *RESHARDED)},
    "ep2": (*RESHARDED, SHARDED),
    SHARDED: ("ep2", SHARDED),
}
FEW = "few experts"  # kind of the resharded model: blocks with experts and blocks without
SAVED = RESHARDED | {SHARDED: LAYOUTS[2][SHARDED]}


def folders(sources: Sequence[str]) -> list[str]:
    """Return the names of the checkpoints of ``sources``."""
    return [f"experts {source}" for source in sources]


PARITY = "tests.train.parity:compare"
JOBS = {
    size: [RankJob(name, PARITY, (*case, {}, None)) for name, case in cases.items()] for size, cases in CASES.items()
}
for name, layout in BALANCED.items():
    JOBS[layout.world_size].append(RankJob(name, PARITY, ("qwen3_moe balanced", layout, COEFFICIENT, None)))
JOBS[2] += [
    RankJob(
        "balance_per_trained_token",
        PARITY,
        ("qwen3_moe balanced", Layout(dp=2), COEFFICIENT, "balance_per_trained_token"),
    ),
    *(RankJob(name, PARITY, ("qwen3_moe", Layout(dp=2, ep=2), keys, None)) for name, keys in RECOMPUTE.items()),
    *(RankJob(fault, PARITY, ("qwen3_moe", layout, {}, fault)) for fault, layout in FAULTS.items()),
    *(RankJob(name, "tests.train.lifecycle:round_trip", case) for name, case in ROUND_TRIP.items()),
    *(
        RankJob(f"reshard from experts {name}", "tests.train.lifecycle:save_then_continue", (layout, FEW, True))
        for name, layout in SAVED.items()
    ),
    *(
        RankJob(
            f"reshard experts to {name}",
            "tests.train.lifecycle:resume_from_each",
            (folders(SOURCES[name]), layout, FEW),
        )
        for name, layout in SAVED.items()
    ),
]
JOBS[4].append(
    RankJob(
        "round trip of shards on four ranks",
        "tests.train.lifecycle:round_trip",
        CASES[4]["qwen3_moe dp2 tp2 sp ep2 etp2"],
    )
)
JOBS[1] += [
    RankJob(
        "reshard experts to single",
        "tests.train.lifecycle:resume_from_each",
        (folders(SOURCES["single"]), Layout(), FEW),
        late=True,
    ),
    RankJob(
        "export each with experts",
        "tests.train.starting:export_each",
        (folders(SOURCES["single"]), FEW),
        late=True,
    ),
]
NAMES = [*(name for cases in CASES.values() for name in cases), *RECOMPUTE, *BALANCED]


@pytest.mark.parametrize("name", NAMES)
def test_equals_hf(name: str, results: Results) -> None:
    errors = comparison(results, name)
    assert errors.worst <= BOUND, errors
    assert errors.score <= BOUND, errors
    assert errors.decay <= DECAY_BOUND, errors
    assert errors.balance <= BOUND, errors


@pytest.mark.parametrize("fault", [*FAULTS, "balance_per_trained_token"])
def test_an_injected_fault_exceeds_the_bound(fault: str, results: Results) -> None:
    errors = comparison(results, fault)
    assert max(errors.worst, errors.score) > 100 * BOUND, errors


@pytest.mark.parametrize("kind", HYBRIDS)
def test_logits_equal_hf(kind: str, results: Results) -> None:
    errors = comparison(results, f"{kind} single")
    assert errors.logits is not None and errors.logits <= BOUND, errors


@pytest.mark.parametrize("name", ROUND_TRIP)
def test_loaded_weights_are_exported_bit_for_bit(name: str, models: dict[str, Path], results: Results) -> None:
    kind = ROUND_TRIP[name][0]
    assert_same_tensors(results[name][0], models[kind])
    before = tensors_of(models[kind])
    if kind == "vision experts":
        assert "model.language_model.layers.3.mlp.experts.gate_up_proj" in before
    carried_prefixes = {"vision experts": {"mtp", "model"}, "qwen3_next experts": {"mtp"}}.get(kind, set())
    assert {name.split(".")[0] for name in before if name.startswith(("mtp.", "model.visual."))} == carried_prefixes


def test_shards_of_experts_are_exported_bit_for_bit(models: dict[str, Path], results: Results) -> None:
    assert_same_tensors(results["round trip of shards on four ranks"][0], models["qwen3_moe"])


@pytest.mark.parametrize(
    ("source", "target"),
    [(source, target) for target, sources in SOURCES.items() for source in sources],
)
def test_another_distribution_of_experts_continues_the_run(source: str, target: str, results: Results) -> None:
    (expected,) = [r["losses"] for r in results[f"reshard from experts {source}"] if r["losses"][0] is not None]
    (losses,) = [
        r for rank in results[f"reshard experts to {target}"] if (r := rank[f"experts {source}"])[0] is not None
    ]
    assert losses == pytest.approx(expected, rel=1e-6)
    assert expected[0] != pytest.approx(expected[1], rel=1e-4)  # so the comparison detects lost optimizer state


# ---- weights, without ranks ------------------------------------------------------------------------------------------
@pytest.fixture(scope="module")
def fused_folder(models: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder of the model with all experts of a block in one tensor."""
    folder = tmp_path_factory.mktemp("fused")
    source = models["qwen3_moe"]
    save_file(fuse_experts(load_file(source / "model.safetensors")), folder / "model.safetensors")
    (folder / "config.json").write_text((source / "config.json").read_text())
    return folder


def test_fused_experts_are_read_like_separate_matrices(models: dict[str, Path], fused_folder: Path) -> None:
    separate_source, fused_source = HFFolder(models["qwen3_moe"]), HFFolder(fused_folder)
    table = family_of(fused_folder, "qwen3_moe").weights()
    assert sum(isinstance(weight, ExpertMatrix) for weight in table.values()) == 4 * 8 * 2
    for key, weight in table.items():
        for a, b in zip(weight.read(separate_source), weight.read(fused_source), strict=True):
            assert torch.equal(a, b), key


@pytest.mark.parametrize("name", ["gate_up_proj", "down_proj"])
def test_fused_experts_of_another_shape_are_named(name: str, fused_folder: Path, tmp_path: Path) -> None:
    full = f"model.layers.2.mlp.experts.{name}"
    tensors = load_file(fused_folder / "model.safetensors")
    save_file(tensors | {full: tensors[full][:7].clone()}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text((fused_folder / "config.json").read_text())
    weights = family_of(tmp_path, "qwen3_moe").weights()
    key = f"blocks.2.mlp.experts.0.linear_{'fc1' if name == 'gate_up_proj' else 'fc2'}.weight"
    with pytest.raises(CheckpointError, match=rf"{full} has shape \(7, .*config\.json implies \(8, "):
        weights[key].read(HFFolder(tmp_path))


def test_a_missing_expert_is_named(models: dict[str, Path], tmp_path: Path) -> None:
    name = "model.layers.1.mlp.experts.5.up_proj.weight"
    tensors = load_file(models["qwen3_moe"] / "model.safetensors")
    del tensors[name]
    save_file(tensors, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text((models["qwen3_moe"] / "config.json").read_text())
    with pytest.raises(CheckpointError, match=rf"has no tensor '{name}'"):
        family_of(tmp_path, "qwen3_moe").weights()["blocks.1.mlp.experts.5.linear_fc1.weight"].read(HFFolder(tmp_path))


def test_keys_have_global_expert_indices() -> None:
    local = "blocks.3.mlp.experts.local_experts.1.linear_fc1.weight"
    assert global_key(local, 4, 0) == "blocks.3.mlp.experts.1.linear_fc1.weight"
    assert global_key(local, 4, 1) == "blocks.3.mlp.experts.5.linear_fc1.weight"
    shared = "blocks.3.mlp.shared_experts.linear_fc1.weight"
    assert global_key(shared, 4, 1) == shared
    assert keys_of_peers(shared, 8, 2) == (shared,)
    peers = keys_of_peers("blocks.3.mlp.experts.5.linear_fc1.weight", 8, 2)
    assert peers == tuple(f"blocks.3.mlp.experts.{e}.linear_fc1.weight" for e in (1, 5))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_experts_per_tok": 9}, "num_experts_per_tok=9 of 8 experts: choose 1 to 8"),
        ({"num_experts_per_tok": 1}, "num_experts_per_tok=1 with norm_topk_prob=true"),
    ],
)
def test_an_impossible_router_is_refused(models: dict[str, Path], change: dict[str, int], message: str) -> None:
    assert_refused(models["qwen3_moe"], "qwen3_moe", 1, change, message)


def test_blocks_without_experts_have_an_mlp(models: dict[str, Path]) -> None:
    family = family_of(models["qwen3_moe"], "qwen3_moe", mlp_only_layers=[2])
    assert family.blocks() == ("*E", "*E", "*-", "*E")
    assert "blocks.2.mlp.linear_fc1.weight" in family.weights()
    alternating = family_of(models["qwen3_moe"], "qwen3_moe", decoder_sparse_step=2)
    assert alternating.blocks() == ("*-", "*E", "*-", "*E")


@pytest.mark.parametrize("source", RESHARDED)
def test_a_converted_checkpoint_equals_the_export_of_its_ranks(source: str, results: Results, scratch: Path) -> None:
    name = f"experts {source}"
    expected = scratch / f"reshard_from_{name}".replace(" ", "_") / "hf"
    assert_same_tensors(results["export each with experts"][0][name], expected)
