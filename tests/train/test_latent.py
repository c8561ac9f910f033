"""Latent attention (DeepSeek-V2, DeepSeek-V3, Kimi K2): loss, gradients and log-probabilities equal transformers', an
export equals the loaded weights bit for bit, and expert biases follow the load of the whole optimizer step."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from slime_like.config.schema.resolved import Layout
from slime_like.train.megatron.families.hf import HFFolder
from tests.train.expert_bias import updated_by_hf
from tests.train.jobs import SP, RankJob, Results
from tests.train.parity import assert_equals_hf, comparison
from tests.train.weights import assert_refused, assert_same_tensors, assert_shards_merge, family_of, tensors_of

pytestmark = pytest.mark.ranks

BOUND = 1e-5
LAYOUTS: dict[int, dict[str, Layout]] = {
    1: {"single": Layout()},
    2: {
        "tp2 sp": Layout(**SP),
        "pp2": Layout(pp=2),
        "cp2": Layout(cp=2),
        "ep2": Layout(dp=2, ep=2),
        "tp2 sp ep2": Layout(ep=2, **SP),
    },
    4: {"pp2 tp2 sp ep2": Layout(pp=2, ep=2, **SP)},
}
# The other kinds run only in the layouts that split what differs from DeepSeek-V3: the full-rank queries and softmax
# routers of V2, and the heads of Kimi K2, whose size the C kernel of attention supports.
KINDS = {
    "deepseek_v3": tuple(name for layouts in LAYOUTS.values() for name in layouts),
    "deepseek_v2": ("single", "tp2 sp ep2"),
    "kimi_k2": ("single", "tp2 sp", "cp2"),
}
CASES = {
    size: {
        f"{kind} {name}": (kind, layout)
        for name, layout in layouts.items()
        for kind, names in KINDS.items()
        if name in names
    }
    for size, layouts in LAYOUTS.items()
}
ROUND_TRIP = {
    f"round trip {kind} {name}": (kind, LAYOUTS[2][name])
    for kind, name in (("deepseek_v2", "tp2 sp"), ("deepseek_v3", "tp2 sp ep2"), ("kimi_k2", "pp2"))
}
FAULTS = {
    "keys_of_own_heads": ("deepseek_v3", Layout(**SP)),
    "groups_ranked_by_megatron": ("deepseek_v2", Layout(pp=2)),
    "angles_without_yarn": ("kimi_k2", Layout(pp=2)),
}
UPDATED = {f"expert bias {name}": LAYOUTS[2][name] for name in ("tp2 sp ep2", "cp2", "ep2")}
JOBS = {
    size: [RankJob(name, "tests.train.parity:compare", (*case, {}, None)) for name, case in cases.items()]
    for size, cases in CASES.items()
}
JOBS[2] += [
    *(RankJob(name, "tests.train.lifecycle:round_trip", case) for name, case in ROUND_TRIP.items()),
    *(RankJob(fault, "tests.train.parity:compare", (*case, {}, fault)) for fault, case in FAULTS.items()),
    *(RankJob(name, "tests.train.expert_bias:update_and_resume", (layout,)) for name, layout in UPDATED.items()),
]
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
    folder = models[ROUND_TRIP[name][0]]
    assert_same_tensors(results[name][0], folder)
    has_mtp = any(key.startswith("model.layers.4.") for key in tensors_of(folder))
    assert has_mtp == (folder == models["deepseek_v3"])


@pytest.fixture(scope="module")
def updated_biases(models: dict[str, Path]) -> dict[str, Tensor]:
    """Return the expert biases after one update, from the experts that transformers chooses."""
    return updated_by_hf(models["deepseek_v3"])


@pytest.mark.parametrize("name", UPDATED)
def test_expert_biases_follow_the_load_of_all_ranks(
    name: str, updated_biases: dict[str, Tensor], results: Results
) -> None:
    expected = updated_biases
    assert len(expected) == 3
    for updated, resumed in results[name]:
        assert updated.keys() == resumed.keys() == expected.keys()
        for key, bias in expected.items():
            torch.testing.assert_close(updated[key], bias, rtol=0, atol=1e-7)
            assert torch.equal(resumed[key], updated[key])


# ---- weights and configs, without ranks ------------------------------------------------------------------------------
@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize("kind", KINDS)
def test_shards_merge_to_the_hf_tensors(models: dict[str, Path], kind: str, tp: int) -> None:
    assert_shards_merge(family_of(models[kind], kind, tp), models[kind], tp)


def test_kimi_is_read_by_the_config_class_of_deepseek(models: dict[str, Path]) -> None:
    folder = HFFolder(models["kimi_k2"])
    assert folder.raw_config["model_type"] == "kimi_k2"
    assert type(folder.config()).model_type == "deepseek_v3"
    assert folder.config().model_type == "kimi_k2"  # which a resumed run compares with config.json
    assert folder.config().rope_parameters["rope_type"] == "yarn"


@pytest.mark.parametrize(
    ("kind", "changes", "blocks"),
    [
        ("deepseek_v3", {"first_k_dense_replace": 2}, ("+-", "+-", "+E", "+E")),
        ("deepseek_v2", {"first_k_dense_replace": 1, "moe_layer_freq": 2}, ("+-", "+-", "+E", "+-")),
        ("deepseek_v3", {"first_k_dense_replace": 4}, ("+-",) * 4),
    ],
)
def test_blocks_before_the_first_expert_have_an_mlp(
    models: dict[str, Path], kind: str, changes: dict[str, int], blocks: tuple[str, ...]
) -> None:
    assert family_of(models[kind], kind, **changes).blocks() == blocks


@pytest.mark.parametrize(
    ("kind", "tp", "change", "message"),
    [
        ("deepseek_v3", 1, {"rope_interleave": False}, "rope_interleave=False of a deepseek_v3 model"),
        ("deepseek_v3", 1, {"norm_topk_prob": False}, "norm_topk_prob=False of a deepseek_v3 model"),
        ("deepseek_v2", 1, {"norm_topk_prob": True}, "norm_topk_prob=True of a deepseek_v2 model"),
        ("deepseek_v3", 1, {"scoring_func": "softmax"}, "scoring_func='softmax'.*only 'sigmoid'"),
        ("deepseek_v2", 1, {"topk_method": "noaux_tc"}, "topk_method='noaux_tc'.*'greedy' or 'group_limited_greedy'"),
        ("deepseek_v3", 1, {"num_key_value_heads": 2}, "num_key_value_heads=2.*only 4"),
        ("deepseek_v3", 1, {"n_group": 3}, "n_group=3, topk_group=2 of 8 experts: n_group must divide"),
        ("deepseek_v3", 1, {"topk_group": 1}, "a group has 2 experts, too few to rank groups or to choose 4"),
        ("deepseek_v3", 1, {"n_group": 8, "topk_group": 4}, "a group has 1 experts, too few to rank"),
        ("deepseek_v3", 2, {"q_lora_rank": 25}, "parallel.tp=2 does not divide the model's q_lora_rank=25"),
    ],
)
def test_an_unsupported_variant_is_refused(
    models: dict[str, Path], kind: str, tp: int, change: dict[str, Any], message: str
) -> None:
    assert_refused(models[kind], kind, tp, change, message)
