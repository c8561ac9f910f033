"""A trainer rank that is stopped in the middle of a run: named, and the run ends with everything that belongs to it."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from slime_like.cluster.plan_guard import ring_folder
from slime_like.distributed.ring import read_rings
from tests.e2e.runs import Training, last_step

pytestmark = pytest.mark.e2e


def test_a_stopped_rank_is_named_and_the_run_ends(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    training = Training(
        "+recipe=quickstart_sft",
        f"run.dir={run_dir}",
        f"model.hf_checkpoint={tmp_path / 'assets' / 'model'}",
        f"data.train={tmp_path / 'assets' / 'sft.jsonl'}",
        "placement.actor_num_gpus_per_node=2",
        "guard.deadline_s=3",
        log=tmp_path / "log",
    )
    training.wait_until(lambda: last_step(run_dir) >= 2)
    rings = ring_folder(str(run_dir))
    pids = {name: reading.pid for name, reading in read_rings(rings).items()}
    assert set(pids) == {"trainer_rank0", "trainer_rank1"}
    os.kill(pids["trainer_rank1"], signal.SIGSTOP)
    done = training.wait()
    assert done.code not in (0, -signal.SIGKILL)
    assert "did not arrive: rank 1" in done.output or "arrived, but then: rank 1" in done.output, done.output
    assert f"process {pids['trainer_rank1']} stopped" in done.output
    (bundle,) = run_dir.glob("crash-*")
    assert "rank 1" in (bundle / "cause.txt").read_text()
    assert f"trainer_rank1: process {pids['trainer_rank1']} stopped" in (bundle / "collectives.txt").read_text()
    assert not any(Path(f"/proc/{pid}").exists() for pid in pids.values())
    assert not rings.exists()
