"""Trainer ranks on two Ray nodes, each with an engine."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.e2e.runs import metrics
from tests.nodes.cluster import RayNodes, start_run
from tests.nodes.conftest import SmallJob

pytestmark = pytest.mark.e2e
TWO_NODES = ("placement.actor_num_nodes=2", "placement.actor_num_gpus_per_node=1")


def addresses_of_engines(run_dir: Path, count: int) -> list[str]:
    """Return the address that each engine listens at, from its log."""
    logs = [(run_dir / "logs" / f"engine_{i}.log").read_text() for i in range(count)]
    return [re.findall(r"'host': '([\d.]+)'", log)[-1] for log in logs]


def test_a_rank_pushes_to_engines_of_its_own_node_and_of_another(
    all_nodes: RayNodes, job: SmallJob, tmp_path: Path
) -> None:
    run = start_run(
        all_nodes,
        all_nodes.nodes[0],
        tmp_path / "run",
        *job.overrides(*TWO_NODES, "rollout.num_engines=2", "loop.num_rollout=2"),
    )
    code, output = run.wait()
    assert code == 0, output
    assert addresses_of_engines(run.run_dir, 2) == [node.address for node in all_nodes.nodes[:2]]
    rows = metrics(run.run_dir)
    assert max(row["probe/logprob_abs_diff_max"] for row in rows[-2:]) < 1e-4
    assert rows[-1]["rollout/engine_load_max"] < 2.0, "both engines answered"
