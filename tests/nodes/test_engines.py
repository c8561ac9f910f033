"""Engines that are added during a run, moved to another node after the loss of their own, and removed."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from slime_like.cluster.run.control import Request, RequestText
from slime_like.cluster.run.control_client import send_request
from slime_like.data import faults
from slime_like.data.dump import load_groups, rollout_path
from tests.e2e.runs import last_step, metrics
from tests.nodes.cluster import REPOSITORY, RUN_S, RayNodes, addresses_of_engines, start_run
from tests.nodes.job import SmallJob
from tests.nodes.machine import NamespaceNode

pytestmark = pytest.mark.e2e


def test_an_engine_is_added_moves_to_another_node_and_is_removed_and_no_group_is_lost(
    all_nodes: RayNodes, job: SmallJob, tmp_path: Path
) -> None:
    """The node of the added engine joins the cluster during the run."""
    one, two, three = all_nodes.nodes
    three.kill()
    settings = ("placement.mode=split", "loop.num_rollout=10000", "run.dump_rollouts=true")
    run = start_run(all_nodes, one, tmp_path / "run", *job.overrides(*settings))
    run.wait_until(lambda: last_step(run.run_dir) >= 2)
    all_nodes.start(three)
    send_request(run.run_dir, RequestText(Request.ENGINES, 2))
    run.wait_until(lambda: "warning: engine 1 serves" in run.output())
    assert addresses_of_engines(run.run_dir, 2) == [two.address, three.address]
    three.kill(power=True)
    run.wait_until(lambda: any(recovery.joined for recovery in faults.read(run.run_dir)[1]))
    assert addresses_of_engines(run.run_dir, 2) == [two.address, two.address]
    send_request(run.run_dir, RequestText(Request.ENGINES, 1))
    run.wait_until(lambda: "control: engines=1: done: 1 engine: engine 1 removed" in run.output())
    send_request(run.run_dir, Request.STOP)
    code, output = run.wait()
    assert code == 130, output
    (recovery,) = [recovery for recovery in faults.read(run.run_dir)[1] if recovery.joined]
    assert recovery.engine == "engine 1" and "was lost with its node" in recovery.cause
    rows = metrics(run.run_dir)
    assert [row["step"] for row in rows] == list(range(len(rows)))
    assert max(row["probe/logprob_abs_diff_max"] for row in rows[1:]) < 1e-4
    groups = [group for i in range(len(rows) - 1) for group in load_groups(rollout_path(run.run_dir / "rollouts", i))]
    assert [group.group_id for group in groups] == list(range(8 * len(rows) - 8)), "each group is trained on once"


def test_an_engine_over_two_nodes_gets_weights_by_both_transports_and_replaces_a_lost_node(
    all_nodes: RayNodes, job: SmallJob, tmp_path: Path
) -> None:
    """The ranks of the engine are on node two and on node three, which is killed; it continues on nodes two and one.

    The second run, with data-parallel attention, pushes by ``tensor``.
    """
    one, two, three = all_nodes.nodes
    wide = ("rollout.tp=2", "rollout.engine_num_nodes=2")
    split = (*wide, "placement.mode=split", "weights.transport=broadcast", "loop.num_rollout=10000")
    run = start_run(all_nodes, one, tmp_path / "run", *job.overrides(*split))
    run.wait_until(lambda: last_step(run.run_dir) >= 1)
    assert f"1 engine part on {two.address}, 1 engine part on {three.address}" in run.output()
    three.kill()
    run.wait_until(lambda: any(recovery.joined for recovery in faults.read(run.run_dir)[1]))
    (recovery,) = faults.read(run.run_dir)[1]
    assert f"its part on node {three.address}" in recovery.cause
    trained = last_step(run.run_dir)
    run.wait_until(lambda: last_step(run.run_dir) > trained)
    assert addresses_of_engines(run.run_dir, 1) == [two.address]
    send_request(run.run_dir, Request.STOP)
    code, output = run.wait()
    assert code == 130, output
    assert engine_processes(one) == engine_processes(two) == [], "no process remains on any node"
    requests = ("weights.transport=tensor", "rollout.dp_attention=2", "loop.num_rollout=1")
    colocated = start_run(all_nodes, one, tmp_path / "colocated", *job.overrides(*wide, *requests))
    code, output = colocated.wait()
    assert code == 0, output
    for run_dir in (run.run_dir, colocated.run_dir):
        rows = metrics(run_dir)
        assert [row["step"] for row in rows] == list(range(len(rows)))
        assert max(row["probe/logprob_abs_diff_max"] for row in rows[1:]) < 1e-4
        assert (run_dir / "logs" / "engine_0_node1.log").exists()


def test_ray_reserves_no_bundle_on_an_excluded_node(all_nodes: RayNodes) -> None:
    """Without the exclusion, Ray would choose the first node, which is as empty as the third."""
    one, _, three = all_nodes.nodes
    command = [sys.executable, "-m", "tests.nodes.reserve", all_nodes.address]
    output = subprocess.run(
        one.enter(*command), capture_output=True, text=True, timeout=RUN_S, env=all_nodes.environment, cwd=REPOSITORY
    )
    assert output.stdout.split() == [three.address], output.stderr[-2000:]


def engine_processes(node: NamespaceNode) -> list[str]:
    """Return the command lines of the engine processes on ``node``."""
    listing = subprocess.run(node.enter("ps", "-eo", "args"), capture_output=True, text=True, timeout=20, check=True)
    return [line for line in listing.stdout.splitlines() if "sglang::" in line or "rollout.engine.main" in line]
