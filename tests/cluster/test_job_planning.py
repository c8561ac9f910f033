"""Plans of jobs for the nodes of a cluster, before they are submitted."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

from slime_like.cluster.jobs.planning import plan_job
from slime_like.cluster.plan.ray_cluster import ClusterNode
from slime_like.errors import ConfigError

CPU_NODE = ClusterNode("10.0.0.1", 0, 8, 32 * 2**30)
H100_NODE = ClusterNode("10.0.0.1", 8, 96, 2**41, "H100", "id1")
HALF_NODES = [ClusterNode(f"10.0.0.{i}", 4, 96, 2**41, "H100", f"id{i}") for i in (1, 2)]
QUICK = ["+recipe=quickstart"]
TWO_NODES = ["placement.actor_num_nodes=2", "placement.actor_num_gpus_per_node=1"]


def test_a_job_is_planned_on_the_clusters_nodes() -> None:
    plan = plan_job(["+recipe=qwen3_30b_a3b"], [H100_NODE])
    assert plan.lines == ("cluster: 1 node, 8 GPUs, 96 CPUs", "starting 8 trainer ranks and 2 engines on cuda")
    assert plan_job(QUICK, [CPU_NODE, CPU_NODE]).cfg.placement.ray_address == "auto"
    unknown = plan_job(["+recipe=qwen3_4b_gsm8k", "model.hf_checkpoint=/shared/own"], [H100_NODE])
    assert len(unknown.warnings) == 1 and unknown.warnings[0].startswith(
        "not planned: model.hf_checkpoint='/shared/own'"
    )


@pytest.mark.parametrize(
    ("arguments", "nodes", "message"),
    [
        (
            ["+recipe=qwen3_30b_a3b"],
            [HALF_NODES[0]],
            r"the run needs 8 GPUs .*, but the nodes have 4 \(10\.0\.0\.1: 4 of 4",
        ),
        (
            ["+recipe=qwen3_30b_a3b"],
            HALF_NODES,
            r"needs 1 node with 8 free GPUs.*10\.0\.0\.2: 4 of 4 .* set placement\.actor_num_nodes=2 .*if nodes will join, pass --grows",
        ),
        (["+recipe=qwen3_30b_a3b", "placement.device=cuda"], [CPU_NODE], r"the nodes have 0 \(10\.0\.0\.1: no GPU\)"),
        (["+recipe=quickstart", *TWO_NODES], [CPU_NODE], "the Ray cluster has 1 node with CPUs"),
        (
            ["+recipe=qwen3_30b_a3b", "rollout.sglang.mem_fraction_static=0.9"],
            [H100_NODE],
            "the run needs .* GiB on a GPU",
        ),
        (["+recipe=qwen3_next_80b_a3b"], [H100_NODE] * 3, "the run needs 32 GPUs .*, but the nodes have 24"),
        (["+recipe=qwen3_30b_a3b"], [ClusterNode("a", 8, 4, 2**41, "H100")], "needs 8 GPUs with a CPU each"),
        (["+recipe=quickstart", "optim.lrr=1"], [CPU_NODE], "optim.lrr"),
        (["+recipe=quickstart", "--plan"], [CPU_NODE], "--plan does not start a run"),
        (["+recipe=quickstart"], [], "the cluster has no live node"),
    ],
)
def test_a_run_that_does_not_fit_is_not_submitted(arguments: list[str], nodes: list[ClusterNode], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        plan_job(arguments, nodes)


def test_a_run_that_waits_for_nodes_is_submitted_to_a_cluster_that_grows() -> None:
    plan = plan_job(["+recipe=qwen3_30b_a3b", "placement.wait_deadline_s=900"], HALF_NODES, grows=True)
    assert plan.lines == ("cluster: 2 nodes, 8 GPUs, 192 CPUs",)
    assert re.match(
        r"not planned, since the run waits .* at most placement.wait_deadline_s=900: .*8 free", plan.warnings[0]
    )
    with pytest.raises(ConfigError, match=r"the run needs .* GiB on a GPU"):
        plan_job(["+recipe=qwen3_30b_a3b", "rollout.sglang.mem_fraction_static=0.9"], HALF_NODES, grows=True)


@pytest.mark.parametrize(("grows", "warns"), [(True, True), (False, False)])
def test_a_run_that_would_take_cpus_before_nodes_with_gpus_join_is_named(grows: bool, warns: bool) -> None:
    plan = plan_job(QUICK, [CPU_NODE], grows=grows)
    assert any("if nodes with GPUs will join, set placement.device=cuda" in line for line in plan.warnings) == warns
    assert not plan_job([*QUICK, "placement.device=cpu"], [CPU_NODE], grows=grows).warnings


def test_only_nodes_that_the_run_uses_have_to_be_large_enough() -> None:
    """The ranks fill the nodes in the order of their addresses."""
    small = ClusterNode("10.0.0.2", 8, 8, 2**35, "L4", "id2")
    assert plan_job(["+recipe=qwen3_30b_a3b"], [small, H100_NODE]).warnings == ()
    with pytest.raises(ConfigError, match=r"on a GPU .* each L4 has 22\.5 GiB"):
        plan_job(["+recipe=qwen3_30b_a3b"], [replace(small, address="10.0.0.0"), H100_NODE])
    with pytest.raises(ConfigError, match=r"needs 8 GPUs with a CPU each"):
        plan_job(["+recipe=qwen3_30b_a3b"], [replace(H100_NODE, num_cpus=4), replace(small, num_cpus=64)])


def test_engines_fit_a_cluster_with_different_nodes() -> None:
    """The nodes have six GPUs on average, and an engine of eight fits the larger one."""
    sizes = ("placement.actor_num_gpus_per_node=4", "rollout.tp=8", "rollout.num_engines=1")
    nodes = [HALF_NODES[0], replace(H100_NODE, node_id="id9")]
    plan = plan_job(["+recipe=qwen3_4b_gsm8k_async", *sizes], nodes)
    assert plan.lines[1] == "starting 4 trainer ranks and 1 engine on cuda"
