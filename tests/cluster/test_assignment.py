"""Nodes of a run's processes in a joined Ray cluster, and the wait for nodes that are missing."""

from __future__ import annotations

import itertools
import re

import pytest
import ray

from slime_like.cluster.plan.assignment import assign
from slime_like.cluster.plan.machine import described_machine
from slime_like.cluster.plan.planner import Plan, make_plan
from slime_like.cluster.plan.ray_cluster import ClusterNode, cluster_nodes
from slime_like.cluster.start import local_ray, placement
from slime_like.config.load.loader import load_config
from slime_like.config.schema.root import TrainConfig
from slime_like.errors import MissingResources

GIB = 2**30
RECIPE = (
    "+recipe=qwen3_4b_gsm8k",
    "placement.offload_train=false",
    "placement.offload_rollout=false",
    "rollout.sglang.mem_fraction_static=0.5",
    "placement.ray_address=10.0.0.1:6379",
    "placement.wait_deadline_s=1",
)


def planned(*overrides: str, machine: str = "64xH200") -> tuple[TrainConfig, Plan]:
    cfg = load_config([*RECIPE, "placement.device=cuda", *overrides], files=False, machine=False)
    return cfg, make_plan(cfg, described_machine(machine))


def gpu_node(number: int, num_gpus: int, taken: int = 0) -> ClusterNode:
    return ClusterNode(f"10.0.0.{number}", num_gpus, 64, 2048 * GIB, "H200", f"id{number}", taken)


def cpu_node(number: int) -> ClusterNode:
    return ClusterNode(f"10.0.0.{number}", 0, 8, 64 * GIB, "", f"id{number}")


def nodes_of_gpus(cfg: TrainConfig, plan: Plan, nodes: list[ClusterNode]) -> list[int]:
    """Return the number of the node of each GPU of the run."""
    return [int(node.address.rpartition(".")[2]) for node in assign(cfg, plan, nodes).gpus]


def test_ranks_fill_nodes_in_numerical_order_of_their_addresses() -> None:
    cfg, plan = planned("placement.actor_num_nodes=2", "placement.actor_num_gpus_per_node=4", "rollout.num_engines=2")
    nodes = [gpu_node(10, 4), gpu_node(9, 4), gpu_node(2, 2)]
    assert nodes_of_gpus(cfg, plan, nodes) == [9] * 4 + [10] * 4, "not 10 before 9, and no rank on the node of two GPUs"
    assert assign(cfg, plan, nodes).summary == "4 GPUs on 10.0.0.9, 4 GPUs on 10.0.0.10"


def test_an_engine_is_never_spread_over_nodes() -> None:
    """Four trainer GPUs and two engines of six would cross the boundary of an 8-GPU node if filled in order."""
    split = ("placement.mode=split", "placement.actor_num_gpus_per_node=4", "rollout.tp=4", "rollout.num_engines=3")
    cfg, plan = planned(*split)
    nodes = [gpu_node(1, 6), gpu_node(2, 6), gpu_node(3, 4)]
    with pytest.raises(MissingResources, match=r"rollout\.tp=4: an engine .* no node .* has 4 free GPUs"):
        assign(cfg, plan, nodes)
    result = nodes_of_gpus(cfg, plan, [*nodes, gpu_node(4, 5)])
    assert [set(result[i : i + 4]) for i in range(0, 16, 4)] == [{1}, {3}, {4}, {2}], "best fit first"


def test_gpus_of_other_jobs_are_not_assigned() -> None:
    cfg, plan = planned("placement.actor_num_gpus_per_node=4", "rollout.num_engines=1")
    assert set(nodes_of_gpus(cfg, plan, [gpu_node(1, 8, taken=5), gpu_node(2, 4)])) == {2}
    with pytest.raises(MissingResources, match=r"10\.0\.0\.1: 3 of 8 GPUs free"):
        assign(cfg, plan, [gpu_node(1, 8, taken=5)])


def test_the_fix_for_nodes_of_four_gpus_is_named_and_works() -> None:
    cfg, plan = planned("placement.actor_num_gpus_per_node=8", "rollout.num_engines=1")
    nodes = [gpu_node(1, 4), gpu_node(2, 4)]
    with pytest.raises(MissingResources, match=r"with 8 trainer ranks on each needs 1 nodes") as error:
        assign(cfg, plan, nodes)
    fix = re.findall(r"placement\.actor_num\w+=\d+", str(error.value).rpartition("or set ")[2])
    assert fix == ["placement.actor_num_nodes=2", "placement.actor_num_gpus_per_node=4"]
    assert nodes_of_gpus(*planned(*fix, "rollout.num_engines=1"), nodes) == [1] * 4 + [2] * 4


def test_on_cpus_engines_are_on_the_nodes_without_ranks() -> None:
    overrides = ("placement.device=cpu", "placement.actor_num_nodes=2", "placement.actor_num_gpus_per_node=2")
    engines = ("rollout.num_engines=3", "rollout.tp=1", "parallel.tp=1")
    nodes = [cpu_node(number) for number in (4, 1, 3, 2)]
    split = assign(*planned(*overrides, *engines, "placement.mode=split"), nodes).processes
    assert split is not None
    assert [n.address[-1] for n in split["trainer"]] == list("1122")
    assert [n.address[-1] for n in split["engine"]] == list("343")
    colocated = assign(*planned(*overrides, *engines), nodes).processes
    assert colocated is not None and [n.address[-1] for n in colocated["engine"]] == list("121")
    with pytest.raises(MissingResources, match=r"placement\.actor_num_nodes=2, but the Ray cluster has 1 nodes"):
        assign(*planned(*overrides, *engines), nodes[:1])


def test_free_gpus_are_those_that_ray_has_not_reserved() -> None:
    entry = {"NodeID": "a", "Alive": True, "NodeManagerAddress": "10.0.0.1", "Resources": {"GPU": 8.0, "CPU": 8.0}}
    assert cluster_nodes([entry], {"a": {"GPU": 3.0}})[0].free_gpus == 3
    assert cluster_nodes([entry], {"a": {"CPU": 3.0}})[0].free_gpus == 0, "Ray leaves out what is used up"
    assert cluster_nodes([entry])[0].free_gpus == 8


def test_bundles_are_in_the_order_of_nodes_and_gpus() -> None:
    locations = [("a", "10"), ("a", "9"), ("b", "1"), ("a", "0"), ("b", "0")]
    order = placement.in_order(locations)
    assert [locations[bundle] for bundle in order] == [("a", "0"), ("a", "9"), ("b", "0"), ("a", "10"), ("b", "1")]


def test_a_run_waits_for_missing_nodes_and_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    cfg, plan = planned("placement.actor_num_nodes=2", "placement.actor_num_gpus_per_node=4", "rollout.num_engines=1")
    seen = itertools.chain([(gpu_node(1, 4),)] * 3, itertools.repeat((gpu_node(1, 4), gpu_node(2, 4))))
    lines: list[str] = []
    monkeypatch.setattr(local_ray, "join", lambda *_: None)
    monkeypatch.setattr(local_ray, "nodes", lambda: next(seen))
    monkeypatch.setattr(placement, "POLL_S", 0.01)
    monkeypatch.setattr(placement, "placement_group", lambda bundles, **_: pytest.fail(f"reserved {bundles}"))
    with pytest.raises(pytest.fail.Exception, match=r"reserved .*node:10\.0\.0\.1.*node:10\.0\.0\.2"):
        placement.Placement(cfg, plan, "stacks", lines.append).open()
    assert [line.partition(",")[0] for line in lines] == ["waiting for the Ray cluster", "nodes: 4 GPUs on 10.0.0.1"]
    assert "the nodes have 4 (10.0.0.1: 4 of 4 GPUs free): add nodes" in lines[0]
    monkeypatch.setattr(local_ray, "nodes", lambda: (gpu_node(1, 4),))
    monkeypatch.setenv("SLIME_LIKE_DEADLINE_FACTOR", "0.05")
    with pytest.raises(MissingResources, match=r"needs 8 GPUs .*the nodes have 4 .*placement\.wait_deadline_s=1"):
        placement.Placement(cfg, plan, "stacks", lines.append).open()
    assert not ray.is_initialized()
