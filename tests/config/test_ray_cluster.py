"""Plans of runs on a joined Ray cluster, compared with the resources that its nodes report."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from slime_like.cluster.plan.machine import described_machine
from slime_like.cluster.plan.planner import Plan, make_plan
from slime_like.cluster.plan.ray_cluster import ClusterNode, cluster_nodes, plan_on_nodes
from slime_like.config.load.loader import load_config
from slime_like.config.schema.root import TrainConfig
from slime_like.errors import ConfigError

GIB = 2**30
H100 = ClusterNode("10.0.0.1", 8, 64, 512 * GIB, "H100")
JOINED = ("placement.ray_address=10.0.0.1:6379", "placement.device=cuda")
RESIDENT = (
    "placement.offload_train=false",
    "placement.offload_rollout=false",
    "rollout.sglang.mem_fraction_static=0.5",
)


def plan_of(*overrides: str, recipe: str = "qwen3_4b_gsm8k") -> tuple[TrainConfig, Plan]:
    resident = RESIDENT if recipe == "qwen3_4b_gsm8k" else ()
    cfg = load_config([f"+recipe={recipe}", *JOINED, *resident, *overrides], files=False, machine=False)
    return cfg, make_plan(cfg, described_machine("4x8xH200"))


def entry(address: str, resources: dict[str, float], *, alive: bool = True) -> dict[str, Any]:
    return {"Alive": alive, "NodeManagerAddress": address, "Resources": resources}


def test_resources_of_live_nodes_are_read() -> None:
    memory = {"memory": 300.0 * GIB, "object_store_memory": 200.0 * GIB}
    entries = [
        entry("10.0.0.1", {"CPU": 64, "GPU": 8, "accelerator_type:H100": 1, **memory}),
        entry("10.0.0.2", {"CPU": 4, "memory": GIB}),
        entry("10.0.0.3", {"CPU": 4, "GPU": 8}, alive=False),
    ]
    assert cluster_nodes(entries) == (
        ClusterNode("10.0.0.1", 8, 64, 500 * GIB, "H100"),
        ClusterNode("10.0.0.2", 0, 4, GIB),
    )


@pytest.mark.parametrize(("name", "gpu"), [("GeForce-RTX-4090", "RTX4090"), ("H20", "H20"), ("V100", "V100")])
def test_rays_names_of_gpus_are_the_planners(name: str, gpu: str) -> None:
    (node,) = cluster_nodes([entry("a", {"GPU": 1, f"accelerator_type:{name}": 1})])
    assert node.gpu_name == gpu


def test_a_run_that_fits_the_nodes_is_accepted() -> None:
    assert plan_on_nodes(*plan_of(), [H100]).warnings == ()
    two = ClusterNode("10.0.0.2", 4, 32, 512 * GIB, "H100")
    assert plan_on_nodes(*plan_of(), [two, two, ClusterNode("10.0.0.9", 0, 4, GIB)]).warnings == ()


@pytest.mark.parametrize(
    ("overrides", "nodes", "message"),
    [
        ((), [ClusterNode("a", 4, 64, 512 * GIB, "H100")], r"needs 8 GPUs .*the nodes have 4: lower parallel"),
        ((), [ClusterNode("a", 8, 4, 512 * GIB, "H100")], r"8 GPUs with a CPU each, .* for 4 of them: .*--num-cpus"),
        (("model.recompute=none",), [H100], r"each H100 has 79\.6 GiB: set model\.recompute=full"),
        ((), [H100, ClusterNode("b", 8, 64, 512 * GIB, "L4")], r"each L4 has 22\.5 GiB"),
        ((), [ClusterNode("a", 8, 64, 100 * GIB, "H100")], r"GiB of main memory on a node .*has 100\.0 GiB"),
        ((), [H100, ClusterNode("b", 8, 64, 100 * GIB, "H100")], r"GiB of main memory on a node .*has 100\.0 GiB"),
        (
            ("optim.cpu_offload=true",),
            [ClusterNode("a", 8, 64, 190 * GIB, "H100")],
            r"checkpoint 55\.0 GiB.*set optim\.cpu_offload_fraction=0\.\d+",
        ),
    ],
)
def test_nodes_that_are_too_small_are_refused(
    overrides: tuple[str, ...], nodes: list[ClusterNode], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        plan_on_nodes(*plan_of(*overrides), nodes)


def test_the_named_offload_fraction_fits() -> None:
    node = ClusterNode("a", 8, 64, 190 * GIB, "H100")
    with pytest.raises(ConfigError, match="set optim") as refusal:
        plan_on_nodes(*plan_of("optim.cpu_offload=true"), [node])
    fix = str(refusal.value).split("set ")[1].split()[0]
    assert plan_on_nodes(*plan_of("optim.cpu_offload=true", fix), [node]).warnings == ()


def test_gpus_without_a_known_kind_are_reported() -> None:
    (warning,) = plan_on_nodes(*plan_of(), [ClusterNode("a", 8, 64, 512 * GIB)]).warnings
    assert "is not checked: the planner does not know the GPU ''" in warning


def test_a_driver_without_gpus_has_to_say_where_to_run(argv: list[str], plan: Any) -> None:
    joined_address = "placement.ray_address=10.0.0.1:6379"
    cfg = load_config([*argv, joined_address])
    with pytest.raises(ConfigError, match=r"the Ray cluster at .* has 8 GPUs: set placement\.device=cuda"):
        plan_on_nodes(cfg, plan(joined_address), [H100])
    run_config = load_config([*argv, joined_address, "placement.device=cpu"])
    assert plan_on_nodes(run_config, plan(joined_address, "placement.device=cpu"), [H100]).warnings == ()


def test_the_memory_of_nodes_without_gpus_is_summed(argv: list[str], plan: Any) -> None:
    many_engines = ("placement.ray_address=10.0.0.1:6379", "placement.device=cpu", "rollout.num_engines=20")
    cfg, small = load_config([*argv, *many_engines]), ClusterNode("a", 0, 8, 8 * GIB)
    assert plan_on_nodes(cfg, plan(*many_engines), [small, small]).warnings == ()
    with pytest.raises(ConfigError, match=r"GiB of memory .* but the nodes have 8\.0 GiB"):
        plan_on_nodes(cfg, plan(*many_engines), [small])


@pytest.mark.parametrize(
    ("gpu", "size", "reason"),
    [
        ("H100", 2, "without DCP, the KV cache holds"),
        ("V100", 1, "the KV cache is not predicted: the planner does not know the GPU 'V100'"),
    ],
)
def test_the_size_of_dcp_groups_is_decided_on_the_nodes(
    gpu: str, size: int, reason: str, argv: list[str], plan: Callable[..., Plan]
) -> None:
    keys = ("rollout.tp=8", "placement.actor_num_gpus_per_node=8", "rollout.sglang.max_total_tokens=2048")
    overrides = (*JOINED, *keys, "rollout.dcp=auto")
    before = plan(*overrides)  # by a driver without GPUs
    (decision,) = [decision for decision in before.decisions if decision.key == "rollout.dcp"]
    assert (decision.value, before.engines[0].dcp) == ("auto", 1) and "once it responds" in decision.reason
    on_nodes = plan_on_nodes(load_config([*argv, *overrides]), before, [replace(H100, gpu_name=gpu)])
    assert {engine.dcp for engine in on_nodes.plan.engines} == {on_nodes.plan.dcp.size} == {size}
    assert on_nodes.decisions[0].value == str(size) and reason in on_nodes.decisions[0].reason


@pytest.mark.parametrize(("is_driver", "size"), [(True, 1), (False, 2)])
def test_a_variable_of_the_driver_counts_for_the_nodes(
    is_driver: bool, size: int, argv: list[str], plan: Callable[..., Plan], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SGLANG_FLASHINFER_USE_PAGED", "1")
    keys = ("rollout.tp=8", "placement.actor_num_gpus_per_node=8", "rollout.sglang.max_total_tokens=2048")
    overrides = (*JOINED, *keys, "rollout.dcp=auto", "rollout.sglang.attention_backend=flashinfer")
    on_nodes = plan_on_nodes(load_config([*argv, *overrides]), plan(*overrides), [H100], is_driver=is_driver)
    assert {engine.dcp for engine in on_nodes.plan.engines} == {on_nodes.plan.dcp.size} == {size}
    assert ("variable SGLANG_FLASHINFER_USE_PAGED=1" in on_nodes.decisions[0].reason) == is_driver


def test_a_configured_size_is_not_decided_again(argv: list[str], plan: Callable[..., Plan]) -> None:
    overrides = (*JOINED, "rollout.tp=8", "placement.actor_num_gpus_per_node=8", "rollout.dcp=2")
    on_nodes = plan_on_nodes(load_config([*argv, *overrides]), plan(*overrides), [H100])
    assert on_nodes.decisions == () and on_nodes.plan.engines[0].dcp == 2
