"""What a run does when it is asked: everything in one rollout, and what cannot be done is said and ends nothing."""

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
from slime_like.metrics.drift import DriftWatch
from slime_like.metrics.sinks import FanOut, JsonlSink
from slime_like.metrics.spans import Spans
from slime_like.metrics.types import Last, Metric
from slime_like.rollout.generate import evaluate
from slime_like.rollout.manager import Collected
from slime_like.types import StepStats
from tests.cluster.test_checkpoints import Saver, checkpoints, latest


@dataclass
class Evaluated:
    """The rollout side, of which only evaluations are asked."""

    found: tuple[Metric, ...]
    asked: int = 0

    def evaluate(self) -> evaluate.Evaluated:
        self.asked += 1
        return evaluate.Evaluated(self.found)


@dataclass
class Trainer(Saver):
    def rest(self) -> None: ...


@dataclass
class Made:
    run: Any
    rollout: Evaluated
    trainer: Trainer
    said: list[str] = field(default_factory=list[str])


def make(folder: Path, *, found: tuple[Metric, ...] = (), trainer: Trainer | None = None) -> Made:
    said: list[str] = []
    trainer = trainer or Trainer(slow={1, 2, 3})
    run: Any = object.__new__(Run)
    run.cfg = TrainConfig()
    run.run_dir, run.trainer, run.rollout, run.stop = folder, trainer, Evaluated(found), StopRequest()
    run.control = Control(folder, said.append)
    run.control.open(0, 9)
    run.sink, run.spans, run.rollout_id, run.engine_ranks = (
        FanOut([JsonlSink(folder / "metrics.jsonl", 0)]),
        Spans(),
        0,
        0,
    )
    run.checkpoints = checkpoints(folder / "checkpoints", trainer, "continue")
    run.num_empty, run.drift = 0, DriftWatch(0.0, 1.0, None)
    run.first_rollout = -1  # not of this part of the run
    run.chaos = Chaos(run.cfg.chaos, folder, {})
    run.assembly = type("Assembly", (), {"overlong": None})
    return Made(run, run.rollout, trainer, said)


def finish(made: Made, done: int) -> None:
    made.run.finish_rollout(done - 1, Collected((), 0.0, 1.0, ()), StepStats(done, (Last("train/loss", 1.0),)), ())


@pytest.fixture(autouse=True)
def without_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("slime_like.cluster.run.training_run.group_metrics", lambda *_: [])


def outcomes(folder: Path) -> dict[str, str]:
    status = read_status(folder)
    assert status is not None
    return {answer.request: f"{answer.state}: {answer.detail}" for answer in status.requests}


def test_everything_that_is_asked_for_is_done_when_the_rollout_is_over(tmp_path: Path) -> None:
    made = make(tmp_path, found=(Last("eval/sums", 0.5), Last("eval/sums-truncated_ratio", 0.0)))
    finish(made, 1)
    assert (made.rollout.asked, made.trainer.written, made.run.stop.requested) == (0, [], False)
    for request in Request:
        (made.run.control.folder / request).touch()
    finish(made, 2)
    made.run.control.close()
    assert outcomes(tmp_path) == {
        "eval": "done: sums 0.500",
        "save": "done: checkpoints/iter_0000002",
        "report": "done: report.html",
        "stop": "done: the run ends after 2 rollouts, with a checkpoint",
    }
    assert made.run.stop.requested
    assert latest(tmp_path / "checkpoints") == "2", "a save that was asked for is whole when it is answered"
    assert "sums" in (tmp_path / "report.html").read_text()


def test_what_cannot_be_done_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = make(tmp_path, trainer=Trainer(fails_to_finish={2}))
    (tmp_path / "report.html").mkdir()
    for request in (Request.EVAL, Request.SAVE, Request.REPORT):
        (made.run.control.folder / request).touch()
    finish(made, 2)
    found = outcomes(tmp_path)
    assert found["eval"] == "failed: no engines or no evaluation.datasets"
    assert found["save"] == "failed: nothing was written"
    assert found["report"].startswith("failed: IsADirectoryError")
    assert not made.run.stop.requested
    made.run.checkpoints.enabled = False
    (made.run.control.folder / Request.SAVE).touch()
    finish(made, 3)
    assert outcomes(tmp_path)["save"] == "failed: a run without a trainer has nothing to save"
    made.run.control.close()
