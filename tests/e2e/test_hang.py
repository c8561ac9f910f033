"""Two real trainer ranks: what their collectives take is measured, and one that is stopped is named as the run ends."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from slime_like.cluster.plan_guard import ring_folder
from slime_like.config.load import load_config
from slime_like.deadline import Deadline
from slime_like.distributed.ring import read_rings
from tests.e2e.runs import REPOSITORY, RUN_S, Training, last_step, metrics

pytestmark = pytest.mark.e2e


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, ...]:
    """Supervised training on two ranks; the first run makes its data and model."""
    assets = tmp_path_factory.mktemp("assets")
    return (
        "+recipe=quickstart_sft",
        f"model.hf_checkpoint={assets / 'model'}",
        f"data.train={assets / 'sft.jsonl'}",
        "placement.actor_num_gpus_per_node=2",
    )


def test_the_users_own_run_is_profiled(two_ranks: tuple[str, ...], tmp_path: Path) -> None:
    """And its communicators come and go meanwhile."""
    script = [sys.executable, "scripts/profile_comm.py", "--steps", "3", "--out", str(tmp_path)]
    own = (*two_ranks, f"run.dir={tmp_path / 'run'}", "guard.release=true", "run.save_hf=false")
    limit = Deadline("test", "profile_comm.py", RUN_S).limit
    done = subprocess.run([*script, *own], cwd=REPOSITORY, capture_output=True, text=True, check=False, timeout=limit)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert "| op | group | ranks | calls | bytes per call | first use: allocator drop |" in done.stdout
    assert any(line.startswith("| all_reduce | dp") and " | 2 | " in line for line in done.stdout.splitlines())
    cfg = load_config(["+recipe=quickstart_sft", "--config-dir", str(tmp_path), "guard=measured"], files=False)
    assert "all_reduce" in cfg.guard.ops
    rows = metrics(tmp_path / "run")
    assert [row["guard/checks"] for row in rows if "guard/checks" in row] == [0, 0, 0]
    assert all(row["guard/reload_time"] > 0 for row in rows if "train/loss" in row)


def test_a_stopped_rank_is_named_and_the_run_ends(two_ranks: tuple[str, ...], tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    training = Training(*two_ranks, f"run.dir={run_dir}", "guard.deadline_s=10", log=tmp_path / "log")
    training.wait_until(lambda: last_step(run_dir) >= 2)
    rings = ring_folder(str(run_dir))
    pids = {name: reading.pid for name, reading in read_rings(rings).items()}
    assert set(pids) == {"trainer_rank0", "trainer_rank1"}
    ranks = [psutil.Process(pid) for pid in pids.values()]
    os.kill(pids["trainer_rank1"], signal.SIGSTOP)
    done = training.wait()
    assert done.code not in (0, -signal.SIGKILL)
    assert "did not arrive: rank 1" in done.output or "arrived, but then: rank 1" in done.output, done.output
    assert f"process {pids['trainer_rank1']} stopped" in done.output
    (bundle,) = run_dir.glob("crash-*")
    assert "rank 1" in (bundle / "cause.txt").read_text()
    assert f"trainer_rank1: process {pids['trainer_rank1']} stopped" in (bundle / "collectives.txt").read_text()
    assert not rings.exists()
    _, alive = psutil.wait_procs(ranks, timeout=Deadline("test", "killed ranks", 20).limit)
    assert not alive, f"outlived the run: {alive}"
