"""Trainer ranks on two nodes: the folder that they need, weight pushes to engines on each node, and the loss of a node."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from slime_like.checkpoint.files import iteration_folder, latest_iteration, resumable_iteration
from slime_like.util.deadline import scale
from tests.e2e.runs import last_step, metrics
from tests.nodes.cluster import RayNodes, addresses_of_engines, start_run
from tests.nodes.job import SmallJob
from tests.nodes.machine import LOCAL

pytestmark = pytest.mark.e2e
DEADLINE_S, GRACE_S = 4, 4  # limit of a collective; longest time from then to its error
TWO_NODES = ("placement.actor_num_nodes=2", "placement.actor_num_gpus_per_node=1")


def test_ranks_on_nodes_with_own_folders_write_and_resume_one_checkpoint(all_nodes: RayNodes, job: SmallJob) -> None:
    """Each rank holds half of the layers. A node that was started again has an empty folder."""
    one, two, _ = all_nodes.nodes
    overrides = job.sft(*TWO_NODES, "parallel.pp=2", "run.save_interval=1", "run.save_hf=true", "optim.warmup_steps=0")
    run_dir = Path(f"/proc/{one.init}/root{LOCAL}/run")
    run = start_run(all_nodes, one, LOCAL / "run", *overrides, "loop.num_rollout=1000")
    run.wait_until(
        lambda: (run_dir / "checkpoints").exists() and (resumable_iteration(run_dir / "checkpoints") or 0) >= 2
    )
    assert f"run.dir is not shared with {two.address}: checkpoints are sent between the nodes" in run.output()
    two.kill()
    code, output = run.wait()
    assert code == 1 and "trainer rank 1 died" in output and two.address in output, output
    trained = latest_iteration(run_dir / "checkpoints")
    assert any(path.name.startswith("__1_") for path in iteration_folder(run_dir / "checkpoints", trained).iterdir())
    all_nodes.start(two)
    folder = Path(f"/proc/{two.init}/root{LOCAL}/run")
    code, output = start_run(all_nodes, one, LOCAL / "run", *overrides, f"loop.num_rollout={trained + 2}").wait()
    assert code == 0, output
    assert [row["step"] for row in metrics(run_dir)][-2:] == [trained + 1, trained + 2]
    assert latest_iteration(run_dir / "checkpoints") == trained + 2
    assert {path.name for path in (run_dir / "hf").glob("model-*")} == {
        "model-stage0-00000.safetensors",
        "model-stage1-00000.safetensors",
    }
    assert not [path for path in folder.rglob("*") if path.is_file() and "stacks" not in path.parts], "nothing remains"


def test_the_loss_of_a_rank_ends_the_run_which_resumes_on_the_returned_node_with_a_lossy_link(
    all_nodes: RayNodes, job: SmallJob, tmp_path: Path
) -> None:
    """The run pushes by ``broadcast`` to a third node, and when resumed by ``tensor`` to the nodes with ranks."""
    one, two, three = all_nodes.nodes
    settings = (*TWO_NODES, "run.save_interval=1")
    split = ("placement.mode=split", "loop.num_rollout=1000")
    run = start_run(all_nodes, one, tmp_path / "run", *job.overrides(*settings, *split))
    run.wait_until(lambda: last_step(run.run_dir) >= 2)
    assert f"nodes: 1 trainer on {one.address}, 1 trainer on {two.address}, 1 engine on {three.address}" in run.output()
    assert addresses_of_engines(run.run_dir, 1) == [three.address]
    rows = metrics(run.run_dir)[1:]
    assert max(row["probe/logprob_abs_diff_max"] for row in rows) < 1e-4 and rows[-1]["train/grad_norm"] > 0
    two.kill(power=True)
    code, output = run.wait()
    assert code == 1 and "trainer rank 1 died" in output and two.address in output, output
    trained = last_step(run.run_dir)
    all_nodes.start(two)
    colocated = ("placement.mode=colocated", "rollout.num_engines=2", f"loop.num_rollout={trained + 2}")
    with two.slow_link("20mbit", 8_000):
        code, output = start_run(all_nodes, one, tmp_path / "run", *job.overrides(*settings, *colocated)).wait()
        assert code == 0, output
        assert two.num_lost_packets() > 0
    assert addresses_of_engines(run.run_dir, 2) == [one.address, two.address]
    rows = metrics(run.run_dir)
    assert [row["step"] for row in rows] == list(range(trained + 3))
    assert max(row["probe/logprob_abs_diff_max"] for row in rows[-2:]) < 1e-4
    assert rows[-1]["rollout/engine_load_max"] < 2.0, "both engines answered"


def test_a_collective_over_a_slow_link_ends_at_its_deadline(all_nodes: RayNodes, job: SmallJob, tmp_path: Path) -> None:
    """An all-reduce of the gradients takes longer than ``guard.deadline_s``, and no rank is at fault."""
    one, two, _ = all_nodes.nodes
    settings = (*TWO_NODES, f"guard.deadline_s={DEADLINE_S}", "loop.num_rollout=100000")
    run = start_run(all_nodes, one, tmp_path / "run", *job.sft(*settings))
    run.wait_until(lambda: last_step(run.run_dir) >= 1)
    # gloo applies the deadline to each part of an op, so a part has to take longer.
    with two.slow_link(f"{1000 / scale():.0f}kbit", 8_000):
        code, output = run.wait()
    assert code == 1, output
    error = re.search(
        r"CollectiveError: \w+ #\d+ of \d+ bytes failed on rank (\d) after ([\d.]+) s, phase step, .*", output
    )
    assert error is not None, output
    cause = re.search(r"^RuntimeError: .*gloo.*", output[error.end() :], re.MULTILINE)
    assert cause is not None, output
    # The peer may have begun the op earlier: it then closes the connection before this rank's deadline.
    skew_s = 1 if "Connection closed by peer" in cause[0] else 0
    assert (DEADLINE_S - skew_s) * scale() <= float(error[2]) < (DEADLINE_S + GRACE_S) * scale(), output
    assert f"every rank on this node arrived; not recorded here: ranks {1 - int(error[1])}" in error[0]
