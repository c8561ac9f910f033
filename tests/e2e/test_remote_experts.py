"""GRPO on a small MoE with half of the experts in a worker, which is killed once: engine and trainer agree after every push."""

from __future__ import annotations

import threading
from pathlib import Path

import psutil
import pytest

from slime_like.quickstart.arithmetic import ArithmeticSpec
from slime_like.quickstart.model import MOE, write_model
from tests.e2e import checks
from tests.e2e.conftest import SMALL_ROLLOUTS
from tests.e2e.runs import metrics, train

pytestmark = pytest.mark.e2e
ROLLOUTS = 4
WORKER = "slime_like_plugins.remote_experts.worker"


def workers() -> list[psutil.Process]:
    """Return the workers that descend from this process."""
    running_workers: list[psutil.Process] = []
    for process in psutil.Process().children(recursive=True):
        try:
            if WORKER in process.cmdline():
                running_workers.append(process)
        except psutil.Error:
            continue
    return running_workers


def kill_once(run_dir: Path, killed: list[int], ended: threading.Event) -> None:
    """Kill the worker when the first rollout has been trained."""
    while not ended.is_set():
        trained = (run_dir / "metrics.jsonl").exists() and len(metrics(run_dir)) > 1
        if trained and (running := workers()):
            running[0].kill()
            killed.append(running[0].pid)
            return
        ended.wait(0.2)


def test_training_continues_when_the_worker_of_remote_experts_is_killed(tmp_path: Path) -> None:
    model, run_dir = tmp_path / "model", tmp_path / "run"
    write_model(model, MOE)
    ArithmeticSpec().write(tmp_path)
    killed: list[int] = []
    ended = threading.Event()
    killer = threading.Thread(target=kill_once, args=(run_dir, killed, ended))
    killer.start()
    try:
        result = train(
            "+recipe=quickstart_moe",
            "run.prepare=null",
            f"model.hf_checkpoint={model}",
            f"data.train={tmp_path / 'train.jsonl'}",
            "reward.name=tests.e2e.custom:digits",  # random answers have different scores
            "evaluation.datasets={}",
            "evaluation.interval=null",
            "optim.warmup_steps=0",
            *SMALL_ROLLOUTS,
            "rollout.remote_experts.count=4",
            "rollout.remote_experts.policy=respawn",
            f"rollout.remote_experts.record_load={tmp_path / 'load.json'}",
            f"run.dir={run_dir}",
            f"loop.num_rollout={ROLLOUTS}",
            log=tmp_path / "log",
        )
    finally:
        ended.set()
        killer.join()
    assert result.code == 0, result.output
    assert len(killed) == 1
    rows = metrics(run_dir)
    checks.check_consistency(rows)
    checks.check_documented(rows)
    log = (run_dir / "logs" / "engine_0.log").read_text()
    assert log.count("slime_like remote experts: ") >= 2, "no second worker"
    assert (tmp_path / "load.json").is_file()
    for row in rows[1:]:
        assert row["probe/routed_experts_gap_max"] <= checks.MAX_LOGPROB_DIFFERENCE
    assert not workers()
