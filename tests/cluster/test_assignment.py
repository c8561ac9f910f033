"""Assignment of a run's processes to the nodes of a joined Ray cluster, and the wait for missing nodes."""

from __future__ import annotations

import itertools
import re
from types import SimpleNamespace

import pytest
import ray

from slime_like.cluster.plan.assignment import assign
from slime_like.cluster.plan.machine import described_machine
from slime_like.cluster.plan.planner import Plan, make_plan
from slime_like.cluster.plan.ray_cluster import ClusterNode, cluster_nodes
from slime_like.cluster.start import local_ray, node_request, placement
from slime_like.cluster.start.node_request import request_bundles, request_strategy
from slime_like.config.load.loader import load_config
from slime_like.config.schema.root import TrainConfig
from slime_like.errors import ConfigError, MissingResources

GIB = 2**30
RECIPE = (
    "+recipe=qwen3_4b_gsm8k",
    "placement.offload_train=false",
    "placement.offload_rollout=false",
    "rollout.sglang.mem_fraction_static=0.5",
    "placement.ray_address=10.0.0.1:6379",
    "placement.wait_deadline_s=1",
)


def plan_of(*overrides: str, machine: str = "64xH200") -> tuple[TrainConfig, Plan]:
    cfg = load_config([*RECIPE, "placement.device=cuda", *overrides], files=False, machine=False)
    return cfg, make_plan(cfg, described_machine(machine))


def gpu_node(number: int, num_gpus: int, num_used: int = 0) -> ClusterNode:
    return ClusterNode(f"10.0.0.{number}", num_gpus, 64, 2048 * GIB, "H200", f"id{number}", num_used)


def cpu_node(number: int) -> ClusterNode:
    return ClusterNode(f"10.0.0.{number}", 0, 8, 64 * GIB, "", f"id{number}")


def nodes_of_gpus(cfg: TrainConfig, plan: Plan, nodes: list[ClusterNode]) -> list[int]:
    """Return the number of the node of each GPU of the run."""
    return [int(node.address.rpartition(".")[2]) for node in assign(cfg, plan, nodes).gpus]


def test_ranks_fill_nodes_in_numerical_order_of_their_addresses() -> None:
    cfg, plan = plan_of("placement.actor_num_nodes=2", "placement.actor_num_gpus_per_node=4", "rollout.num_engines=2")
    nodes = [gpu_node(10, 4), gpu_node(9, 4), gpu_node(2, 2)]
    assert nodes_of_gpus(cfg, plan, nodes) == [9] * 4 + [10] * 4, "not 10 before 9, and no rank on the node of two GPUs"
    assert assign(cfg, plan, nodes).summary == "4 GPUs on 10.0.0.9, 4 GPUs on 10.0.0.10"


def engine_nodes(cfg: TrainConfig, plan: Plan, nodes: list[ClusterNode], first: int) -> list[list[int]]:
    """Return the node of each GPU of each engine; the engines' GPUs begin at index ``first``."""
    gpus, tp = nodes_of_gpus(cfg, plan, nodes), cfg.rollout.tp
    return [gpus[begin : begin + tp] for begin in range(first, len(gpus), tp)]


def test_an_engine_is_on_one_node_if_it_fits_and_else_in_equal_parts_on_several() -> None:
    """The trainer has four GPUs of node 1. Only two of three engines fit on one node, so all engines span two nodes."""
    split = ("placement.mode=split", "placement.actor_num_gpus_per_node=4", "rollout.tp=4", "rollout.num_engines=3")
    cfg, plan = plan_of(*split)
    nodes = [gpu_node(1, 6), gpu_node(2, 6), gpu_node(3, 4)]
    assert engine_nodes(cfg, plan, nodes, 4) == [[2, 2, 3, 3], [2, 2, 1, 1], [2, 2, 3, 3]]
    assert assign(cfg, plan, nodes).nodes_per_engine == 2
    with pytest.raises(
        MissingResources, match=r"rollout\.tp=4: the Ray cluster has too few free GPUs .* in equal parts"
    ):
        assign(cfg, plan, [gpu_node(1, 6), gpu_node(2, 7), gpu_node(3, 3)])
    with pytest.raises(MissingResources, match=r"rollout\.num_engines=3 engines, each on 4 nodes \(10\.0"):
        assign(*plan_of(*split, "rollout.engine_num_nodes=4"), [*nodes])
    result = nodes_of_gpus(cfg, plan, [*nodes, gpu_node(4, 5)])
    assert [set(result[i : i + 4]) for i in range(0, 16, 4)] == [{1}, {3}, {4}, {2}], "best fit first"


WIDE = ("placement.actor_num_nodes=4", "placement.actor_num_gpus_per_node=4", "rollout.num_engines=2")


def test_a_colocated_engine_has_all_gpus_of_several_nodes() -> None:
    nodes = [gpu_node(number, 4) for number in (1, 2, 3, 4)]
    cfg, plan = plan_of(*WIDE, "rollout.tp=8", "parallel.tp=4")
    assert assign(cfg, plan, nodes).nodes_per_engine == 2
    assert engine_nodes(cfg, plan, nodes, 0) == [[1] * 4 + [2] * 4, [3] * 4 + [4] * 4]
    with pytest.raises(
        ConfigError, match=r"rollout\.engine_num_nodes=4, but .* trainer on 2 nodes: remove rollout\.engine"
    ):
        assign(*plan_of(*WIDE, "rollout.tp=8", "parallel.tp=4", "rollout.engine_num_nodes=4"), nodes)
    three = (
        "placement.actor_num_nodes=2",
        "placement.actor_num_gpus_per_node=3",
        "rollout.tp=2",
        "rollout.num_engines=3",
    )
    with pytest.raises(ConfigError, match=r"would have 1 \+ 1 GPUs on 2 nodes, and the first engine 2; .*equal parts"):
        assign(*plan_of(*three, "parallel.tp=2"), [gpu_node(1, 3), gpu_node(2, 3)])


def test_on_cpus_the_parts_of_an_engine_are_on_different_nodes() -> None:
    parts = (
        "placement.device=cpu",
        "rollout.tp=2",
        "rollout.num_engines=2",
        "rollout.engine_num_nodes=2",
        "parallel.tp=1",
    )
    nodes = [cpu_node(number) for number in (1, 2, 3)]
    assignment = assign(*plan_of(*parts, "placement.mode=split"), nodes)
    assert assignment.processes is not None and assignment.nodes_per_engine == 2
    assert [node.address[-1] for node in assignment.processes["engine"]] == list("2323")
    assert "2 engine parts on 10.0.0.2" in assignment.summary
    one_other = assign(*plan_of(*parts, "placement.mode=split"), nodes[:2]).processes
    assert one_other is not None and [node.address[-1] for node in one_other["engine"]] == list("1212")
    with pytest.raises(MissingResources, match=r"rollout\.engine_num_nodes=2, but the Ray cluster has 1 node"):
        assign(*plan_of(*parts), nodes[:1])


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (
            ("rollout.engine_num_nodes=3",),
            r"engine_num_nodes=3 with rollout\.tp=2: every node .* set rollout\.engine_num_nodes to a divisor",
        ),
        (
            ("rollout.engine_num_nodes=2", "placement.ray_address=null"),
            r"without a running Ray cluster: .* or set rollout\.engine_num_nodes=null",
        ),
        (("rollout.engine_num_nodes=2", "rollout.symmetric_memory=true"), r"set rollout\.symmetric_memory=false"),
        (
            ("rollout.engine_num_nodes=2", "rollout.remote_experts.count=1"),
            r"remote_experts: workers of .* not been tested",
        ),
        (
            (
                "rollout.engine_num_nodes=2",
                "rollout.dp_attention=2",
                "rollout.flow_mla.enabled=true",
                "rollout.flow_mla.transport=p2p",
            ),
            r"transport=p2p: a rank cannot read the memory of another node",
        ),
    ],
)
def test_keys_that_do_not_fit_engines_on_several_nodes_are_refused(overrides: tuple[str, ...], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        plan_of("rollout.tp=2", *overrides)


SPLIT_ROLES = {
    "critic": ("algo=ppo", "critic.placement=split", "critic.tp=2", "critic.dp=2"),
    "teacher": ("algo=distill", "teacher.hf_checkpoint=models/Qwen3-8B", "teacher.placement=split", "teacher.tp=2"),
}


@pytest.mark.parametrize("role", SPLIT_ROLES)
def test_each_tensor_parallel_group_of_another_role_is_on_one_node(role: str) -> None:
    sizes = ("placement.actor_num_gpus_per_node=4", "parallel.tp=2", "rollout.tp=2", "rollout.num_engines=1")
    cfg, plan = plan_of(*SPLIT_ROLES[role], *sizes)
    nodes = [gpu_node(1, 4), gpu_node(2, 3), gpu_node(3, 5)]
    groups = itertools.batched(nodes_of_gpus(cfg, plan, nodes)[4:], 2)
    assert plan.roles[2].name == role and all(first == second for first, second in groups)
    odd = [gpu_node(1, 5), *(gpu_node(number, 1) for number in range(2, 10))]
    words = rf"{role}\.tp=2: .* no node .* more than 1 free GPU .* or lower {role}\.tp to 1 or less"
    with pytest.raises(MissingResources, match=words):
        assign(cfg, plan, odd)


def test_gpus_of_other_jobs_are_not_assigned() -> None:
    cfg, plan = plan_of("placement.actor_num_gpus_per_node=4", "rollout.num_engines=1")
    assert set(nodes_of_gpus(cfg, plan, [gpu_node(1, 8, num_used=5), gpu_node(2, 4)])) == {2}
    with pytest.raises(MissingResources, match=r"10\.0\.0\.1: 3 of 8 GPUs free"):
        assign(cfg, plan, [gpu_node(1, 8, num_used=5)])


def test_the_fix_for_nodes_of_four_gpus_is_named_and_works() -> None:
    cfg, plan = plan_of("placement.actor_num_gpus_per_node=8", "rollout.num_engines=1")
    nodes = [gpu_node(1, 4), gpu_node(2, 4)]
    with pytest.raises(MissingResources, match=r"with 8 trainer ranks on each needs 1 node") as error:
        assign(cfg, plan, nodes)
    fix = re.findall(r"placement\.actor_num\w+=\d+", str(error.value).rpartition("or set ")[2])
    assert fix == ["placement.actor_num_nodes=2", "placement.actor_num_gpus_per_node=4"]
    assert nodes_of_gpus(*plan_of(*fix, "rollout.num_engines=1"), nodes) == [1] * 4 + [2] * 4


def test_on_cpus_engines_are_on_the_nodes_without_ranks() -> None:
    overrides = ("placement.device=cpu", "placement.actor_num_nodes=2", "placement.actor_num_gpus_per_node=2")
    engines = ("rollout.num_engines=3", "rollout.tp=1", "parallel.tp=1")
    nodes = [cpu_node(number) for number in (4, 1, 3, 2)]
    split = assign(*plan_of(*overrides, *engines, "placement.mode=split"), nodes).processes
    assert split is not None
    assert [n.address[-1] for n in split["trainer"]] == list("1122")
    assert [n.address[-1] for n in split["engine"]] == list("343")
    colocated = assign(*plan_of(*overrides, *engines), nodes).processes
    assert colocated is not None and [n.address[-1] for n in colocated["engine"]] == list("121")
    with pytest.raises(MissingResources, match=r"placement\.actor_num_nodes=2, but the Ray cluster has 1 node"):
        assign(*plan_of(*overrides, *engines), nodes[:1])


def test_free_gpus_are_those_that_ray_has_not_reserved() -> None:
    entry = {"NodeID": "a", "Alive": True, "NodeManagerAddress": "10.0.0.1", "Resources": {"GPU": 8.0, "CPU": 8.0}}
    assert cluster_nodes([entry], {"a": {"GPU": 3.0}})[0].free_gpus == 3
    assert cluster_nodes([entry], {"a": {"CPU": 3.0}})[0].free_gpus == 0, "Ray leaves out what is used up"
    assert cluster_nodes([entry])[0].free_gpus == 8


def test_bundles_are_in_the_order_of_nodes_and_gpus() -> None:
    locations = [("a", "10"), ("a", "9"), ("b", "1"), ("a", "0"), ("b", "0")]
    order = placement.in_order(locations)
    assert [locations[bundle] for bundle in order] == [("a", "0"), ("a", "9"), ("b", "0"), ("a", "10"), ("b", "1")]


class PlacementGroups:
    """Fake placement groups that Ray places at once."""

    def __init__(self) -> None:
        self.created: list[object] = []
        self.removed: list[object] = []

    def create(self, bundles: object, strategy: str) -> SimpleNamespace:
        assert strategy == "STRICT_SPREAD", "the trainer nodes are different ones"
        self.created.append(bundles)
        return SimpleNamespace(wait=lambda seconds: seconds >= 1)  # a wait of 0 s ends before Ray answers


SPLIT = ("placement.mode=split", "placement.actor_num_gpus_per_node=4", "rollout.num_engines=3")


@pytest.mark.parametrize(
    ("overrides", "nodes", "sizes"),
    [
        ((*SPLIT, "rollout.tp=4"), [], [4] * 4),
        ((*SPLIT, "rollout.tp=8"), [gpu_node(1, 8)], [4, 8, 8, 8]),
        ((*SPLIT, "rollout.tp=8"), [gpu_node(1, 2)], [4] * 7),
        ((*SPLIT, "rollout.tp=16"), [gpu_node(1, 2), gpu_node(2, 8)], [4, *[8] * 6]),
        ((*SPLIT, "rollout.tp=8", "rollout.engine_num_nodes=4"), [gpu_node(1, 8)], [4, *[2] * 12]),
        (("run.mode=rollout_only", "rollout.tp=2", "rollout.num_engines=2"), [], [1] * 4),
        (("placement.actor_num_gpus_per_node=8", "rollout.tp=8", "rollout.num_engines=1"), [], [8]),
        ((*SPLIT_ROLES["critic"], *SPLIT, "rollout.tp=4"), [], [4, 4, 4, 4, 2, 2]),
    ],
)
def test_a_requested_bundle_has_all_gpus_that_have_to_be_on_one_node(
    overrides: tuple[str, ...], nodes: list[ClusterNode], sizes: list[int]
) -> None:
    """Ray could place bundles of single GPUs on nodes where no engine fits, and its autoscaler would add no node."""
    cfg, plan = plan_of(*overrides)
    assert request_bundles(cfg, plan, nodes) == [{"GPU": size, "CPU": size} for size in sizes]
    assert sum(sizes) == plan.num_gpus
    assert request_strategy(plan) == ("STRICT_SPREAD" if sizes == [8] else "PACK")


def test_the_request_of_a_run_on_cpus_has_a_bundle_for_each_node_that_it_needs() -> None:
    parts = ("placement.device=cpu", "parallel.tp=1", "rollout.tp=4", "rollout.engine_num_nodes=4")
    cfg, plan = plan_of(*parts, "placement.actor_num_nodes=2")
    assert request_bundles(cfg, plan, []) == [{"CPU": 1.0}] * 4
    with pytest.raises(MissingResources, match=r"rollout\.engine_num_nodes=4, but the Ray cluster has 3 nodes"):
        assign(cfg, plan, [cpu_node(number) for number in (1, 2, 3)])


def test_a_run_waits_for_missing_nodes_and_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    cfg, plan = plan_of("placement.actor_num_nodes=2", "placement.actor_num_gpus_per_node=4", "rollout.num_engines=1")
    views_of_cluster = itertools.chain([(gpu_node(1, 4),)] * 3, itertools.repeat((gpu_node(1, 4), gpu_node(2, 4))))
    lines, requests = list[str](), PlacementGroups()
    monkeypatch.setattr(local_ray, "join", lambda *_: None)
    monkeypatch.setattr(node_request, "placement_group", requests.create)
    monkeypatch.setattr(node_request, "remove_placement_group", requests.removed.append)
    monkeypatch.setattr(local_ray, "nodes", lambda: next(views_of_cluster))
    monkeypatch.setattr(placement, "POLL_S", 0.01)
    monkeypatch.setattr(placement, "placement_group", lambda bundles, **_: pytest.fail(f"reserved {bundles}"))
    with pytest.raises(pytest.fail.Exception, match=r"reserved .*node:10\.0\.0\.1.*node:10\.0\.0\.2"):
        placement.Placement(cfg, plan, "stacks", lines.append).open()
    assert [line.partition(",")[0] for line in lines] == ["waiting for the Ray cluster", "nodes: 4 GPUs on 10.0.0.1"]
    assert "the nodes have 4 (10.0.0.1: 4 of 4 GPUs free): add nodes" in lines[0]
    assert requests.created == [[{"GPU": 4.0, "CPU": 4.0}] * 2] * 2, "an autoscaler reads the size of each trainer node"
    assert len(requests.removed) == 2, "the first one was placed, the second one is withdrawn"
    monkeypatch.setattr(local_ray, "nodes", lambda: (gpu_node(1, 4),))
    monkeypatch.setenv("SLIME_LIKE_DEADLINE_FACTOR", "0.05")
    with pytest.raises(MissingResources, match=r"needs 8 GPUs .*the nodes have 4 .*placement\.wait_deadline_s=1"):
        placement.Placement(cfg, plan, "stacks", lines.append).open()
    assert not ray.is_initialized()
