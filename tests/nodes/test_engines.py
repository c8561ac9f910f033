"""Engines that are added during a run, moved to another node after the loss of their own, and removed."""

from __future__ import annotations

from pathlib import Path

import pytest

from slime_like.cluster.run.control import Request, RequestText
from slime_like.cluster.run.control_client import send_request
from slime_like.data import faults
from slime_like.data.dump import load_groups, rollout_path
from tests.e2e.runs import last_step, metrics
from tests.nodes.cluster import RayNodes, addresses_of_engines, start_run
from tests.nodes.job import SmallJob

pytestmark = pytest.mark.e2e


def test_an_engine_is_added_moves_to_another_node_and_is_removed_and_no_group_is_lost(
    all_nodes: RayNodes, job: SmallJob, tmp_path: Path
) -> None:
    one, two, three = all_nodes.nodes
    settings = ("placement.mode=split", "loop.num_rollout=10000", "run.dump_rollouts=true")
    run = start_run(all_nodes, one, tmp_path / "run", *job.overrides(*settings))
    run.wait_until(lambda: last_step(run.run_dir) >= 2)
    send_request(run.run_dir, RequestText(Request.ENGINES, 2))
    run.wait_until(lambda: "warning: engine 1 serves" in run.output())
    assert addresses_of_engines(run.run_dir, 2) == [two.address, three.address]
    three.kill(power=True)
    run.wait_until(lambda: any(recovery.joined for recovery in faults.read(run.run_dir)[1]))
    assert addresses_of_engines(run.run_dir, 2) == [two.address, two.address]
    send_request(run.run_dir, RequestText(Request.ENGINES, 1))
    run.wait_until(lambda: "control: engines=1: done: 1 engines: engine 1 removed" in run.output())
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
