"""Two real trainer ranks: what their collectives take is measured, and one that is stopped is named as the run ends."""

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
from tests.e2e.conftest import Warm
from tests.e2e.runs import REPOSITORY, Finished, Training, last_step, metrics

pytestmark = pytest.mark.e2e
SCRIPT = "scripts/profile_comm.py"
DEADLINE_S = 10
GRACE_S = 4  # for the backend to notice, and the rings to be read on a machine that does other things


@dataclass(frozen=True, slots=True)
class Stopped:
    """A run that was measured, one of whose ranks was stopped after two steps."""

    run_dir: Path
    done: Finished
    pid: int  # of the rank that was stopped
    outlived: list[psutil.Process]  # ranks that did not end with the run
    rings: Path  # their folder


@pytest.fixture(scope="module")
def stopped(warm: Warm, tmp_path_factory: pytest.TempPathFactory) -> Stopped:
    """Supervised training on two ranks whose communicators come and go."""
    folder, assets = tmp_path_factory.mktemp("stopped"), warm.folder / "assets"
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
    )
    training.wait_until(lambda: last_step(run_dir) >= 2)
    training.look()
    (rings,) = {path for path in training.held.shared if path.parent == SHARED and path.name.startswith(PREFIX)}
    assert rings.stat().st_mode & 0o777 == 0o700
    pids = {name: reading.pid for name, reading in read_rings(rings).items()}
    assert set(pids) == {"trainer_rank0", "trainer_rank1"}
    ranks = [psutil.Process(pid) for pid in pids.values()]
    training.wait_until(lambda: stopped_in_a_step(rings, pids["trainer_rank1"]))
    done = training.wait()
    _, alive = psutil.wait_procs(ranks, timeout=Deadline("test", "killed ranks", 20).limit)
    return Stopped(run_dir, done, pids["trainer_rank1"], alive, rings)


def stopped_in_a_step(rings: Path, pid: int) -> bool:
    """Stop rank 1, and let it go on unless the other waits for it in this step: it has not done as much as in the last one.

    A barrier ends what communicators are there for: see ``slime_like.distributed.wrapper.reload.release``.
    """
    os.kill(pid, signal.SIGSTOP)
    reading = read_rings(rings)["trainer_rank1"]
    if reading.state != "stopped":  # yet: to be looked at again
        return False
    both = [record for record in reading.records if len(record.group.ranks) == 2]
    ops = "".join("|" if r.op.name == "barrier" else "." for r in both if r.op.name == "barrier" or r.phase == "step")
    *_, last, this = ops.split("|")
    if 0 < len(this) < len(last):
        return True
    os.kill(pid, signal.SIGCONT)
    return False


def test_a_stopped_rank_is_named_and_the_run_ends(stopped: Stopped) -> None:
    assert stopped.done.code == 1
    # Of the rank's peer, which waited in vain: where, and the op at which its ring and that of the stopped rank part.
    named = re.search(
        r"CollectiveError: \w+ #\d+ of \d+ bytes failed on rank 0 after ([\d.]+) s, phase \w+, in group \w+ \(ranks 0, 1\); "
        rf"(\w+ #\d+ in group \w+: (?:did not arrive|arrived, but then): rank 1 \(process {stopped.pid} stopped)",
        stopped.done.output,
    )
    assert named is not None, stopped.done.output
    assert float(named[1]) < (DEADLINE_S + GRACE_S) * scale()
    (bundle,) = stopped.run_dir.glob("crash-*")
    assert named[2] in (bundle / "cause.txt").read_text().splitlines()[0]
    told = (bundle / "collectives.txt").read_text()
    assert told.startswith(named[2]), told
    for rank in range(2):
        assert re.search(
            rf"^trainer_rank{rank}: process \d+ \w+, memory [\d.]+ s ago: [\d.]+ of ", told, re.MULTILINE
        ), told
    assert not stopped.rings.exists()
    assert not stopped.outlived


def test_what_was_measured_until_then_is_read(stopped: Stopped, tmp_path: Path) -> None:
    command = [sys.executable, SCRIPT, "--read", str(stopped.run_dir), "--out", str(tmp_path)]
    limit = Deadline("test", SCRIPT, 60).limit
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=False, timeout=limit)
    assert done.returncode == 0, done.stderr
    assert "| op | group | ranks | calls | bytes per call | first use: allocator drop |" in done.stdout
    assert any(line.startswith("| all_reduce | dp") and " | 2 | " in line for line in done.stdout.splitlines())
    cfg = load_config(["+recipe=quickstart_sft", "--config-dir", str(tmp_path), "guard=measured"], files=False)
    assert "all_reduce" in cfg.guard.ops
    rows = [row for row in metrics(stopped.run_dir) if "train/loss" in row]
    assert len(rows) >= 2
    assert all(row["guard/checks"] == 0 for row in rows)
    assert all(row["guard/reload_time"] > 0 for row in rows)
