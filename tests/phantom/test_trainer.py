"""A trainer rank on a phantom GPU: every model family and layout, roles, checkpoints, guard, offload. Calls and sizes only."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from slime_like.config.schema.algo import GrpoConfig
from slime_like.config.schema.gdn import GDNConfig
from slime_like.config.schema.resolved import Layout
from slime_like.phantom.device import PhantomGpu
from tests.phantom.forks import trainer_forks
from tests.train.jobs import SP, Results
from tests.train.models import HYBRIDS, make_model
from tests.train.options import OVERLAP

pytestmark = pytest.mark.ranks

GIB = 2**30
TORCH_GDN: dict[str, Any] = {"model": {"gdn": GDNConfig(backend="torch")}}  # fla's kernels do not run on a phantom
OFFLOAD: dict[str, Any] = {"optim": {"cpu_offload": True}}
FAMILIES = (
    "qwen2",
    "qwen3",
    "llama",
    "glm4",
    "qwen3_moe",
    "glm4_moe",
    "minimax_m2",
    "deepseek_v2",
    "deepseek_v3",
    "qwen3_5_text",
    "qwen3_next",
    "qwen3_5_moe_text",
)
LAYOUTS: dict[str, tuple[str, Layout, int, dict[str, Any]]] = {
    "tp2 sp": ("qwen3", Layout(**SP), 0, {}),
    "tp2 sp, second rank": ("qwen3", Layout(**SP), 1, {}),
    "tp2": ("qwen3", Layout(tp=2), 0, {}),
    "cp2": ("qwen3", Layout(cp=2), 0, {}),
    "cp2, second rank": ("qwen3", Layout(cp=2), 1, {}),
    "cp2 hybrid": ("qwen3_5_text", Layout(cp=2), 0, TORCH_GDN),
    "tp2 cp2 dp2": ("qwen3", Layout(cp=2, dp=2, **SP), 0, {}),
    "dp4 overlap": ("qwen3", Layout(dp=4, **OVERLAP), 0, {}),
    "dp4, last rank": ("qwen3", Layout(dp=4), 3, {}),
    "dp2 without distributed optimizer": ("qwen3", Layout(dp=2, distributed_optimizer=False), 0, {}),
    "pp2, first stage": ("qwen3", Layout(pp=2), 0, {}),
    "pp2, last stage": ("qwen3", Layout(pp=2), 1, {}),
    "pp4, second stage": ("qwen3", Layout(pp=4), 1, {}),
    "pp2 vpp2, first stage": ("qwen3", Layout(pp=2, vpp=2), 0, {}),
    "pp2 vpp2, last stage": ("qwen3", Layout(pp=2, vpp=2), 1, {}),
    "ep4": ("qwen3_moe", Layout(dp=4, ep=4), 0, {}),
    "ep2 tp2": ("qwen3_moe", Layout(dp=2, ep=2, **SP), 0, {}),
    "etp2 ep2": ("qwen3_moe", Layout(dp=4, ep=2, etp=2), 0, {}),
    "pp2 ep2": ("qwen3_moe", Layout(dp=2, ep=2, pp=2), 3, {}),
    "recompute": ("qwen3", Layout(**SP), 0, {"model": {"recompute": "full"}}),
    "recompute of MLPs": (
        "qwen3",
        Layout(**SP),
        0,
        {"model": {"recompute": "selective", "recompute_modules": ["mlp", "layernorm"]}},
    ),
    "float32": ("qwen3", Layout(), 0, {"dtype": "float32"}),
    "KL to a reference": ("qwen3", Layout(dp=2), 0, {"algo": GrpoConfig(kl_loss_coef=0.1)}),
    "deterministic": ("qwen3", Layout(), 0, {"deterministic": True}),
    "offload of float32 parameters": ("qwen3_5_text", Layout(), 0, TORCH_GDN | OFFLOAD),
}


KL: dict[str, Any] = {"algo": GrpoConfig(kl_loss_coef=0.1)}
WAITS: dict[str, tuple[str, Layout, int, dict[str, Any]]] = {
    **{f"waits, dense, {n}": ("qwen3", Layout(dp=2, **SP), n, KL) for n in (2, 4)},
    **{f"waits, experts, {n}": ("qwen3_moe", Layout(dp=4, ep=4), n, {}) for n in (2, 4)},
}
OFFLOADED = {"no offload": 0.0, "half offload": 0.5, "offload": 1.0}


@pytest.fixture(scope="module")
def scratch(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("phantom")


@pytest.fixture(scope="module")
def results(scratch: Path) -> Results:
    """Run every case in one process on a phantom GPU."""
    models = {family: make_model(scratch / family, family, tied=False, seed=1) for family in FAMILIES}
    qwen, sparse = models["qwen3"], models["qwen3_moe"]
    cases: dict[str, tuple[Any, ...]] = {
        **{f: ("steps", models[f], Layout(), 0, TORCH_GDN if f in HYBRIDS else {}) for f in FAMILIES},
        # In this order, because torch caches pinned memory.
        **{name: ("overlapped_offload", qwen, share) for name, share in OFFLOADED.items()},
        **{name: ("steps", models[family], *rest) for name, (family, *rest) in LAYOUTS.items()},
        **{name: ("waits", models[family], layout, n, o) for name, (family, layout, n, o) in WAITS.items()},
        "critic": ("critic", qwen, Layout(dp=2)),
        "teacher": ("teacher", qwen, Layout(**SP)),
        "save": ("save_and_load", qwen, scratch / "saved", {}),
        "save of experts": ("save_and_load", sparse, scratch / "saved_experts", {}),
        "save, offload": ("save_and_load", models["qwen3_5_text"], scratch / "saved_offload", TORCH_GDN | OFFLOAD),
        "guard": ("guard", qwen, scratch / "guard", Layout(dp=2, **SP), "always"),
        "replay": ("replay", sparse, "old"),
        "residency": ("residency", qwen, {}),
        "residency, half offload": ("residency", qwen, {"cpu_offload": True, "cpu_offload_fraction": 0.5}),
    }
    environment = {**PhantomGpu().environment(), "CUBLAS_WORKSPACE_CONFIG": ":4096:8"}
    out = trainer_forks().run("tests.phantom.trainer_checks:run_cases", cases, environment=environment)
    return Results({name: [result] for name, result in out.items()})


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_trains_scores_and_exports(family: str, results: Results) -> None:
    (result,) = results[family]
    assert result["devices"] == ["cuda:0"] and result["version"] == 2
    assert result["score"] == 64
    assert result["exported"] == result["manifest"] > 30
    assert result["launches"] > 500 and result["products"] > 100


@pytest.mark.parametrize("name", LAYOUTS)
def test_every_layout_trains_scores_and_exports(name: str, results: Results) -> None:
    (result,) = results[name]
    _, layout, rank, _ = LAYOUTS[name]
    assert result["version"] == 2 and result["launches"] > 400
    is_scored = "second" not in name and "first" not in name and rank < 3 and layout.vpp == 1
    assert result["score"] == (64 if is_scored else None)
    assert result["replicated"] == layout.pp * result["manifest"], (
        "every rank has the weights for the engine on its GPU"
    )
    assert result["collectives"] > (15 if layout.world_size > 1 else 5)


# File and function -> number of waits in one optimizer step. One wait is missing, because torch does not report waits
# for an event: megatron's dispatcher waits for the number of rows of each expert, once per layer of experts and forward
# pass.
STEP_WAITS = {
    "param_and_grad_buffer.py:check_grads": 2,  # for each group of buckets
    "rerun_state_machine.py:validate_result": 2,
    "clip_grads.py:get_grad_norm_fp32": 1,
    "sample_difference.py:gather_ragged": 1,  # numbers of tokens of the ranks
    "sample_difference.py:_gather": 3,  # on-policy, mixed and stale
    "step.py:metrics": 1,
    "step.py:_require_equal_names": 1,
    "step.py:_maxima": 1,
    "host_weights.py:copy_to_host": 1,  # policy's weights, before those of the reference replace them
}


@pytest.mark.parametrize("kind", ["dense", "experts"])
def test_no_wait_per_micro_batch_or_parameter(kind: str, results: Results) -> None:
    (few,), (many,) = results[f"waits, {kind}, 2"], results[f"waits, {kind}, 4"]
    places = many["places"]
    early = {"balance.py:close_step"}  # ends at a division by zero if the memory that it reads is zeros
    compared = {line: n for line, n in many["lines"].items() if line not in early}
    per_batch = {places[line]: n for line, n in compared.items() if n != few["lines"].get(line)}
    assert not per_batch, f"the host waits for the device in each micro-batch: {per_batch}"
    assert sum(few["lines"].values()) < few["parameters"] / 2
    allowed = STEP_WAITS | {"balance.py:open_step": 1, "balance.py:close_step": 2} if kind == "experts" else STEP_WAITS
    assert not (unknown := [places[line] for line in many["lines"].keys() - allowed.keys()]), unknown
    groups = 2 if kind == "experts" else 1  # experts have buckets of their own
    assert {places[line]: n for line, n in few["lines"].items() if n > groups * allowed[line]} == {}


@pytest.mark.parametrize("kind", ["dense", "experts"])
def test_a_step_leaves_no_graph(kind: str, results: Results) -> None:
    """A layer that keeps a tensor of its graph keeps its input, and the input's gradient, until its next forward pass."""
    (result,) = results[f"waits, {kind}, 2"]
    assert result["graphs"] == []


def test_roles(results: Results) -> None:
    assert results["critic"] == [{"values": [64, 64], "version": 1}]
    (teacher,) = results["teacher"]
    assert teacher["scores"] == [64, 64] and teacher["extra"] < 0.5, "a teacher has no gradients and no optimizer"


@pytest.mark.parametrize("name", ["save", "save of experts", "save, offload"])
def test_checkpoints_on_the_device(name: str, results: Results) -> None:
    (rank_result,) = results[name]
    assert rank_result["finished"] and (rank_result["iteration"], rank_result["version"]) == (3, 2)
    assert {"config.json", "model.safetensors"} <= set(rank_result["exported"])


def test_guard_and_released_communicators(results: Results) -> None:
    (result,) = results["guard"]
    assert result["generations"] == 1 and result["version"] == 2
    assert result["source"] == "driver"
    calls, checks = result["all_reduce"]
    assert calls == checks > 5


def test_replayed_experts(results: Results) -> None:
    assert results["replay"] == [{"version": 1}]


def test_offload_moves_the_optimizer_to_pinned_memory(results: Results) -> None:
    (none,), (half,), (everything,) = (results[name] for name in ("no offload", "half offload", "offload"))
    assert none["device"] == pytest.approx(18, rel=0.1)  # 2 weights, 4 gradients, 12 optimizer
    assert everything["device"] == pytest.approx(6, rel=0.2)
    assert everything["device"] < half["device"] < none["device"]
    assert none["pinned"] < half["pinned"] < everything["pinned"]


@pytest.mark.parametrize("name", ["half offload", "offload"])
def test_the_optimizer_over_whole_parameters_is_freed(name: str, results: Results) -> None:
    """megatron builds it before the optimizer over a shard, and leaves it in a reference cycle."""
    (result,) = results[name]
    assert result["optimizers"] == 1


@pytest.mark.parametrize(("name", "optimizer"), [("residency", 12), ("residency, half offload", 6)])
def test_each_phase_has_its_parts_on_the_device(name: str, optimizer: int, results: Results) -> None:
    (phases,) = results[name]
    assert phases["push"] == pytest.approx(2, rel=0.1)  # bytes of a weight
    assert phases["save"] == pytest.approx(2 + optimizer, rel=0.15)
    assert phases["step"] == pytest.approx(6 + optimizer, rel=0.15)  # and gradients
    assert 0 <= phases["collect"] < 0.2
    assert phases["reserved"] < 2, "the allocator gives its cached blocks back"
