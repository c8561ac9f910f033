"""Jobs of a Ray cluster of two nodes: submit, follow, list and stop real runs."""

from __future__ import annotations

import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from slime_like.quickstart.arithmetic import ArithmeticSpec, write_datasets
from slime_like.quickstart.model import DENSE, write_model
from slime_like.util.deadline import Deadline
from tests.e2e import checks
from tests.e2e.local_cluster import LocalCluster, local_cluster
from tests.e2e.runs import RUN_S, metrics
from tests.e2e.test_hybrid import FLOW_MLA

pytestmark = [pytest.mark.e2e, pytest.mark.slow]
ROLLOUTS = 3


@pytest.fixture(scope="module")
def cluster() -> Iterator[LocalCluster]:
    with tempfile.TemporaryDirectory(prefix="jobs", dir="/tmp") as folder, local_cluster(Path(folder)) as cluster:
        write_datasets(cluster.folder, ArithmeticSpec())
        write_model(cluster.folder / "model", DENSE)
        yield cluster


def overrides(cluster: LocalCluster, run_dir: Path, data: str) -> tuple[str, ...]:
    """Return the changes of a recipe: a random model, and no evaluation."""
    model, train = f"model.hf_checkpoint={cluster.folder / 'model'}", f"data.train={cluster.folder / data}"
    return ("run.prepare=null", model, train, "evaluation.datasets={}", f"run.dir={run_dir}", "rollout.batch_size=8")


def read_until(process: subprocess.Popen[str], text: str) -> str:
    """Return the output up to the line that contains ``text``; fail if the process ends before."""
    assert process.stdout is not None
    lines: list[str] = []
    for line in process.stdout:
        lines.append(line)
        if text in line:
            return "".join(lines)
    raise AssertionError(f"ended without {text!r}: {''.join(lines)[-3000:]}")


def wait_for_end(process: subprocess.Popen[str]) -> tuple[int, str]:
    """Return exit code and remaining output."""
    output, _ = process.communicate(timeout=Deadline("test", "scripts/submit.py", RUN_S).limit)
    return process.returncode, output


def test_a_submitted_run_streams_its_steps_and_returns_its_code(cluster: LocalCluster, tmp_path: Path) -> None:
    """A trainer rank is on each node.

    The engine's ranks hold different requests, and each has half of the attention weights of a model with shared KV heads.
    """
    changes = overrides(cluster, tmp_path / "run", "train.jsonl")
    steps = (f"loop.num_rollout={ROLLOUTS}", "optim.warmup_steps=0", "algo.kl_loss_coef=0")
    reward = "reward.name=tests.e2e.custom:num_digits"  # random answers have different scores
    ranks = ("placement.actor_num_nodes=2", "placement.actor_num_gpus_per_node=1")
    settings = (*changes, *steps, *ranks, reward, *FLOW_MLA)
    process = cluster.submit("run", "--env", "A_VARIABLE=1", "+recipe=quickstart", *settings)
    output = read_until(process, f"[1/{ROLLOUTS}]")
    assert "cluster: 2 nodes, 0 GPUs, 8 CPUs" in output
    assert "nodes: 1 trainer on 127.0.0.2, 1 trainer on 127.0.0.3, 1 engine on 127.0.0.2" in output
    assert process.poll() is None, "the log is written as it appears"
    code, rest = wait_for_end(process)
    assert code == 0, output + rest
    assert f"[{ROLLOUTS}/{ROLLOUTS}]" in rest and "SUCCEEDED" in rest
    rows = metrics(tmp_path / "run")
    assert [row["train/grad_norm"] > 0 for row in rows if "train/loss" in row] == [True] * ROLLOUTS
    checks.check_consistency(rows)
    log = (tmp_path / "run" / "logs" / "engine_0.log").read_text()
    assert log.count(f"FlowMLA shards o_proj, qkv_proj of {DENSE.num_hidden_layers} layers over 2 ranks") == 2


def test_a_run_with_uploaded_code_outlives_its_submitter_and_is_stopped_with_a_checkpoint(
    cluster: LocalCluster, tmp_path: Path
) -> None:
    python = str(Path(__file__).resolve().parents[2] / ".venv" / "bin" / "python")
    changes = overrides(cluster, tmp_path / "run", "sft.jsonl")
    paths = ("--upload", "--code", "/nowhere", "--python", python)
    process = cluster.submit("run", *paths, "+recipe=quickstart_sft", *changes, "loop.num_rollout=100000")
    job = read_until(process, " submitted; ").splitlines()[-1].split()[1]
    read_until(process, "[2/100000]")
    process.kill()  # as if the submitting machine were switched off
    process.communicate()
    code, listing = wait_for_end(cluster.submit("list"))
    assert code == 0 and f"{job}  RUNNING" in listing
    process = cluster.submit("follow", job)
    read_until(process, "[3/100000]")
    code, output = wait_for_end(cluster.submit("stop", job))
    assert code == 0 and f"job {job} STOPPED" in output, output
    code, output = wait_for_end(process)
    assert code == 130 and "control: stop: done" in output, output
    assert (tmp_path / "run" / "checkpoints" / "latest_checkpointed_iteration.txt").exists()
    code, log = wait_for_end(cluster.submit("follow", job))
    assert code == 130 and "[1/100000]" in log and log.count("control: stop: done") == 1
    _, listing = wait_for_end(cluster.submit("list"))
    assert f"{job}  STOPPED (exit code 130)" in listing and "stop-" not in listing


def test_a_bad_run_and_a_wrong_token_are_refused_before_a_job_starts(cluster: LocalCluster) -> None:
    code, output = wait_for_end(cluster.submit("run", "+recipe=quickstart", "rollout.num_engines=1000"))
    assert code == 2 and output.startswith("ConfigError: the run needs about"), output
    other = LocalCluster(cluster.folder, cluster.gcs_port, cluster.dashboard_port)
    code, output = wait_for_end(other.submit("list"))
    assert code == 2 and "refuses the token (403): set RAY_AUTH_TOKEN" in output, output
