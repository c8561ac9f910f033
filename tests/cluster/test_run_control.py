"""Execution of control requests by a run: all at the end of one rollout; failures are reported, not fatal."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from slime_like.cluster.run.chaos import Chaos
from slime_like.cluster.run.control import Control, Request
from slime_like.cluster.run.status import read_status
from slime_like.cluster.run.stop import StopRequest
from slime_like.cluster.run.training_run import Run
from slime_like.config.schema.root import TrainConfig
from slime_like.errors import ConfigError, EngineError
from slime_like.metrics.drift import DriftWatch
from slime_like.metrics.sinks import JsonlSink, SinkGroup
from slime_like.metrics.spans import Spans
from slime_like.metrics.types import Last, Metric
from slime_like.rollout.generate import evaluate
from slime_like.rollout.selection import CollectedRollout
from slime_like.types import StepStats
from tests.cluster.test_checkpoints import Saver, checkpoints, latest


@dataclass
class EvaluatedRollout:
    """Fake ``RolloutSource`` that evaluates and changes its number of engines."""

    metrics: tuple[Metric, ...]
    num_evaluations: int = 0
    num_engines: int = 1

    def resize(self, num_engines: int) -> str:
        if num_engines > 9:
            raise ConfigError(f"engines={num_engines}: too many")
        self.num_engines = num_engines
        return f"{num_engines} engines: started"

    def evaluate(self) -> evaluate.EvalResult:
        self.num_evaluations += 1
        return evaluate.EvalResult(self.metrics)


@dataclass
class FakeTrainer(Saver):
    def release_communicators(self) -> None: ...


@dataclass
class RunParts:
    run: Any
    rollout: EvaluatedRollout
    trainer: FakeTrainer
    messages: list[str] = field(default_factory=list[str])


def make_run(folder: Path, *, metrics: tuple[Metric, ...] = (), trainer: FakeTrainer | None = None) -> RunParts:
    messages: list[str] = []
    trainer = trainer or FakeTrainer(slow={1, 2, 3})
    run: Any = object.__new__(Run)
    run.cfg = TrainConfig()
    run.run_dir, run.trainer, run.rollout, run.stop = folder, trainer, EvaluatedRollout(metrics), StopRequest()
    run.control = Control(folder, messages.append)
    run.control.open(0, 9)
    run.sink, run.spans, run.rollout_id, run.engine_ranks = (
        SinkGroup([JsonlSink(folder / "metrics.jsonl", 0)]),
        Spans(),
        0,
        0,
    )
    run.checkpoints = checkpoints(folder / "checkpoints", trainer, "continue")
    run.num_empty, run.drift = 0, DriftWatch(0.0, 1.0, None)
    run.first_rollout = -1  # no rollout of the test is the first of its run
    run.chaos = Chaos(run.cfg.chaos, folder, {})
    run.assembly = type("Assembly", (), {"overlong": None})
    return RunParts(run, run.rollout, trainer, messages)


def finish(parts: RunParts, num_done: int) -> None:
    parts.run.finish_rollout(
        num_done - 1, CollectedRollout((), 0.0, 1.0, ()), StepStats(num_done, (Last("train/loss", 1.0),)), ()
    )


@pytest.fixture(autouse=True)
def without_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("slime_like.cluster.run.training_run.group_metrics", lambda *_: [])


def outcomes(folder: Path) -> dict[str, str]:
    status = read_status(folder)
    assert status is not None
    return {answer.request: f"{answer.state}: {answer.detail}" for answer in status.requests}


def test_all_requests_are_done_at_the_end_of_the_rollout(tmp_path: Path) -> None:
    parts = make_run(tmp_path, metrics=(Last("eval/sums", 0.5), Last("eval/sums-truncated_ratio", 0.0)))
    finish(parts, 1)
    assert (parts.rollout.num_evaluations, parts.trainer.written, parts.run.stop.requested) == (0, [], False)
    for request in ("engines=3", *set(Request) - {Request.ENGINES}):
        (parts.run.control.folder / request).touch()
    finish(parts, 2)
    parts.run.control.close()
    assert (parts.rollout.num_engines, parts.run.engine_ranks) == (3, 3)
    assert outcomes(tmp_path) == {
        "eval": "done: sums 0.500",
        "save": "done: checkpoints/iter_0000002",
        "report": "done: report.html",
        "engines=3": "done: 3 engines: started",
        "stop": "done: the run ends after 2 rollouts, with a checkpoint",
    }
    assert parts.run.stop.requested
    assert latest(tmp_path / "checkpoints") == "2", "a requested save is complete when it is answered"
    assert "sums" in (tmp_path / "report.html").read_text()


def test_failed_requests_are_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    parts = make_run(tmp_path, trainer=FakeTrainer(fails_to_finish={2}))
    (tmp_path / "report.html").mkdir()
    for request in (Request.EVAL, Request.SAVE, Request.REPORT, "engines=10"):
        (parts.run.control.folder / request).touch()
    finish(parts, 2)
    replies = outcomes(tmp_path)
    assert replies["eval"] == "failed: no engines or no evaluation.datasets"
    assert replies["save"] == "failed: nothing was written"
    assert replies["report"].startswith("failed: IsADirectoryError")
    assert replies["engines=10"] == "failed: engines=10: too many" and parts.run.engine_ranks == 0
    assert not parts.run.stop.requested
    parts.run.checkpoints.enabled = False
    for request in (Request.SAVE, Request.STOP):
        (parts.run.control.folder / request).touch()
    finish(parts, 3)
    replies = outcomes(tmp_path)
    assert replies["save"] == "failed: a run without a trainer has nothing to save"
    assert replies["stop"] == "done: the run ends after 3 rollouts"
    parts.run.first_rollout = 3
    with pytest.raises(KeyboardInterrupt, match=r"^stopped after 3 rollouts; continue with the same command"):
        next(parts.run.rollout_ids())
    parts.run.control.close()


def test_a_failing_evaluation_keeps_the_metrics_and_the_checkpoint_of_its_step(tmp_path: Path) -> None:
    parts = make_run(tmp_path)
    parts.run.cfg.run.save_interval = 1
    parts.run.cfg.evaluation.interval = 1

    def fail() -> Any:
        raise EngineError("engine 0 is dead")

    parts.rollout.evaluate = fail
    with pytest.raises(EngineError, match="engine 0 is dead"):
        finish(parts, 1)
    parts.run.checkpoints._finish()
    assert '"train/loss": 1.0' in (tmp_path / "metrics.jsonl").read_text()
    assert parts.trainer.written == [1]
