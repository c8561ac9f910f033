"""+recipe=quickstart_async, shortened: a SIGTERM in mid-push, continued, still on the same prompts, and learning."""

from __future__ import annotations

import itertools
from pathlib import Path

import numpy as np
import pytest

from tests.e2e import checks
from tests.e2e.conftest import SMALL, Warm
from tests.e2e.runs import Training, metrics, train
from tests.e2e.test_colocated import expected_prompts

pytestmark = pytest.mark.e2e
ROLLOUTS = 20
FROZEN_AFTER = 17
BATCH = 64  # the recipe's
COMMAND = ("+recipe=quickstart_async",)


@pytest.fixture(scope="module")
def run_dir(warm: Warm, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run whose driver, and nothing else of it, gets SIGTERM in its fifth push; continued by the same command."""
    folder = tmp_path_factory.mktemp("split")
    command = (
        *COMMAND,
        *warm.overrides,
        f"run.dir={folder / 'run'}",
        f"loop.num_rollout={ROLLOUTS}",
        "run.save_interval=3",
        "run.save_hf=true",
        "run.dump_rollouts=true",
        "optim.schedule=linear",
        "optim.min_lr=0",
        f"optim.decay_steps={FROZEN_AFTER}",
    )
    first = Training(*command, "chaos.faults=[terminate:push:4]", log=folder / "first.log")
    stopped = first.wait()
    assert stopped.code == 130, stopped.output
    assert "stopped after 5 rollouts; continue with the same command" in stopped.output
    assert "terminate:push:4:0 on driver: ends the run" in stopped.output
    assert first.leftovers() == []
    second = train(*command, log=folder / "second.log")
    assert second.code == 0, second.output
    return folder / "run"


def test_every_step_is_there_once_and_prompts_go_on(run_dir: Path, warm: Warm) -> None:
    assert [row["step"] for row in metrics(run_dir)] == list(range(ROLLOUTS + 1))
    assert checks.prompt_ids(run_dir, ROLLOUTS) == expected_prompts(warm, ROLLOUTS * BATCH)


def test_rollouts_are_one_version_old_and_overlap_training(run_dir: Path) -> None:
    rows = metrics(run_dir)[1:]
    assert {row["rollout/staleness_max"] for row in rows} <= {0.0, 1.0}
    assert sum(row["rollout/staleness_max"] == 1.0 for row in rows) >= ROLLOUTS - 4
    overlaps = [
        min(now["spans"]["train"][1], later["spans"]["rollout"][1])
        - max(now["spans"]["train"][0], later["spans"]["rollout"][0])
        for now, later in itertools.pairwise(rows)
    ]
    assert sum(seconds > 0 for seconds in overlaps) >= ROLLOUTS - 5


def test_engine_and_trainer_agree_at_every_step(run_dir: Path) -> None:
    rows = metrics(run_dir)
    checks.check_consistency(rows)
    checks.check_documented(rows)


def test_engine_logprobs_are_those_of_the_export(run_dir: Path) -> None:
    checks.check_export(run_dir, ROLLOUTS - 1, set(range(FROZEN_AFTER, ROLLOUTS)), 1.0)


def test_accuracy_rises(run_dir: Path) -> None:
    """The first two rollouts were sampled by the weights of the warm start."""
    accuracy = [row["rollout/accuracy"] for row in metrics(run_dir)[1:]]
    assert np.mean(accuracy[-8:]) > np.mean(accuracy[:2]) + 0.05


def test_a_push_that_never_happened_ends_the_run(warm: Warm, tmp_path: Path) -> None:
    done = train(
        *COMMAND,
        *warm.overrides,
        *SMALL,
        "evaluation.datasets={}",
        "rollout.temperature=0.7",
        "weights.debug_skip_push_at=2",
        f"run.dir={tmp_path / 'run'}",
        log=tmp_path / "skip.log",
    )
    checks.check_skipped_push(done, tmp_path / "run")
