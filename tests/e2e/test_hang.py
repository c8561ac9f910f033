"""Two real trainer ranks: their collectives are measured; a rank that is stopped ends the run and is named."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest

from slime_like.config.load.loader import load_config
from slime_like.distributed.forensics.ring import PREFIX, SHARED, read_rings
from slime_like.util.deadline import Deadline, scale
from tests.e2e.conftest import WarmStart
from tests.e2e.runs import REPOSITORY, RunResult, Training, last_step, metrics
from tests.e2e.worker_server import forking_workers

pytestmark = pytest.mark.e2e
SCRIPT = "scripts/profile_comm.py"
DEADLINE_S = 10
GRACE_S = 4  # for the backend to notice the deadline, and for reading the rings on a busy machine


@dataclass(frozen=True, slots=True)
class StoppedRankRun:
    """A run with measured collectives, one rank of which was stopped after two steps."""

    run_dir: Path
    result: RunResult
    pid: int  # process of the stopped rank
    surviving_ranks: list[psutil.Process]  # ranks that lived after the run's end
    rings: Path  # folder of the rings


@pytest.fixture(scope="module")
def stopped_run(warm_start: WarmStart, tmp_path_factory: pytest.TempPathFactory) -> StoppedRankRun:
    """Return a supervised fine-tuning run on two ranks that release their communicators between steps."""
    folder, assets = tmp_path_factory.mktemp("stopped"), warm_start.folder / "assets"
    run_dir = folder / "run"
    training = Training(
        *("--steps", "50", "--out", str(folder / "unused"), "+recipe=quickstart_sft", f"run.dir={run_dir}"),
        f"model.hf_checkpoint={assets / 'model'}",
        f"data.train={assets / 'sft.jsonl'}",
        "run.prepare=null",
        "placement.actor_num_gpus_per_node=2",
        "guard.release=true",
        f"guard.deadline_s={DEADLINE_S}",
        log=folder / "log",
        script=SCRIPT,
        environment=forking_workers(),
    )
    training.wait_until(lambda: last_step(run_dir) >= 2)
    training.record()
    (rings,) = {
        path for path in training.resources.shared_paths if path.parent == SHARED and path.name.startswith(PREFIX)
    }
    assert rings.stat().st_mode & 0o777 == 0o700
    pids = {name: reading.pid for name, reading in read_rings(rings).items()}
    assert set(pids) == {"trainer_rank0", "trainer_rank1"}
    ranks = [psutil.Process(pid) for pid in pids.values()]
    training.wait_until(lambda: stopped_in_a_step(rings, pids["trainer_rank1"]))
    result = training.wait()
    _, survivors = psutil.wait_procs(ranks, timeout=Deadline("test", "killed ranks", 20).limit)
    return StoppedRankRun(run_dir, result, pids["trainer_rank1"], survivors, rings)


def stopped_in_a_step(rings: Path, pid: int) -> bool:
    """Stop rank 1; continue it and return False unless it stopped inside a step, where rank 0 waits for it.

    Rank 1 is inside a step if it has run some collectives since the last barrier, but fewer than between the two
    barriers before. A barrier precedes each release of communicators: see
    ``slime_like.distributed.wrapper.reload.release``.
    """
    os.kill(pid, signal.SIGSTOP)
    reading = read_rings(rings)["trainer_rank1"]
    if reading.state != "stopped":  # the signal has not taken effect yet
        return False
    shared_records = [record for record in reading.records if len(record.group.ranks) == 2]
    ops = "".join(
        "|" if r.op.name == "barrier" else "." for r in shared_records if r.op.name == "barrier" or r.phase == "step"
    )
    *_, previous_ops, current_ops = ops.split("|")
    if 0 < len(current_ops) < len(previous_ops):
        return True
    os.kill(pid, signal.SIGCONT)
    return False


def test_a_stopped_rank_is_named_and_the_run_ends(stopped_run: StoppedRankRun) -> None:
    assert stopped_run.result.code == 1
    # Rank 0, which waited, reports its collective, and the op at which the rings of the two ranks differ.
    message = re.search(
        r"CollectiveError: \w+ #\d+ of \d+ bytes failed on rank 0 after ([\d.]+) s, phase \w+, in group \w+ \(ranks 0, 1\); "
        rf"(\w+ #\d+ in group \w+: (?:did not arrive|arrived, but then): rank 1 \(process {stopped_run.pid} stopped)",
        stopped_run.result.output,
    )
    assert message is not None, stopped_run.result.output
    assert float(message[1]) < (DEADLINE_S + GRACE_S) * scale()
    (bundle,) = stopped_run.run_dir.glob("crash-*")
    assert message[2] in (bundle / "cause.txt").read_text().splitlines()[0]
    collectives = (bundle / "collectives.txt").read_text()
    assert collectives.startswith(message[2]), collectives
    for rank in range(2):
        assert re.search(
            rf"^trainer_rank{rank}: process \d+ \w+, memory [\d.]+ s ago: [\d.]+ of ", collectives, re.MULTILINE
        ), collectives
    assert not stopped_run.rings.exists()
    assert not stopped_run.surviving_ranks


def test_measurements_before_the_stop_are_readable(stopped_run: StoppedRankRun, tmp_path: Path) -> None:
    command = [sys.executable, SCRIPT, "--read", str(stopped_run.run_dir), "--out", str(tmp_path)]
    limit = Deadline("test", SCRIPT, 60).limit
    result = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=False, timeout=limit)
    assert result.returncode == 0, result.stderr
    assert "| op | group | ranks | calls | bytes per call | first use: allocator drop |" in result.stdout
    assert any(line.startswith("| all_reduce | dp") and " | 2 | " in line for line in result.stdout.splitlines())
    cfg = load_config(["+recipe=quickstart_sft", "--config-dir", str(tmp_path), "guard=measured"], files=False)
    assert "all_reduce" in cfg.guard.ops
    rows = [row for row in metrics(stopped_run.run_dir) if "train/loss" in row]
    assert len(rows) >= 2
    assert all(row["guard/checks"] == 0 for row in rows)
    assert all(row["guard/reload_time"] > 0 for row in rows)
