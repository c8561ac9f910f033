"""+recipe=quickstart_async, shortened: SIGTERM during a push, resume, the same prompts, and rising accuracy."""

from __future__ import annotations

import itertools
from pathlib import Path

import numpy as np
import pytest

from tests.e2e import checks
from tests.e2e.conftest import WarmStart
from tests.e2e.runs import Training, metrics, train
from tests.e2e.test_colocated import expected_prompts
from tests.e2e.worker_server import forking_workers

pytestmark = pytest.mark.e2e
ROLLOUTS = 20
FROZEN_AFTER = 17  # the learning rate is 0 after this many rollouts
BATCH = 32  # prompts of a rollout: half of the recipe's, which learns as fast


@pytest.fixture(scope="module")
def run_dir(warm_start: WarmStart, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a run whose driver receives SIGTERM in its fifth push, resumed by the same command."""
    folder = tmp_path_factory.mktemp("split")
    command = (
        "+recipe=quickstart_async",
        *warm_start.overrides,
        f"run.dir={folder / 'run'}",
        f"loop.num_rollout={ROLLOUTS}",
        f"rollout.batch_size={BATCH}",
        "run.save_interval=3",
        "run.save_hf=true",
        "run.dump_rollouts=true",
        "optim.schedule=linear",
        "optim.min_lr=0",
        f"optim.decay_steps={FROZEN_AFTER}",
    )
    first = Training(
        *command, "chaos.faults=[terminate:push:4]", log=folder / "first.log", environment=forking_workers()
    )
    result = first.wait()
    assert result.code == 130, result.output
    assert "stopped after 5 rollouts; continue with the same command" in result.output
    assert "terminate:push:4:0 on driver: ends the run" in result.output
    assert first.leftovers() == []
    resumed = train(*command, log=folder / "second.log", environment=forking_workers(driver=False))
    assert resumed.code == 0, resumed.output
    return folder / "run"


def test_every_step_is_logged_once_and_resume_continues_with_the_next_prompt(
    run_dir: Path, warm_start: WarmStart
) -> None:
    assert [row["step"] for row in metrics(run_dir)] == list(range(ROLLOUTS + 1))
    assert checks.prompt_ids(run_dir, ROLLOUTS) == expected_prompts(warm_start, ROLLOUTS * BATCH)


def test_rollouts_are_one_version_old_and_overlap_training(run_dir: Path) -> None:
    rows = metrics(run_dir)[1:]
    assert {row["rollout/staleness_max"] for row in rows} <= {0.0, 1.0}
    assert sum(row["rollout/staleness_max"] == 1.0 for row in rows) >= ROLLOUTS - 4
    overlaps = [
        min(row["spans"]["train"][1], next_row["spans"]["rollout"][1])
        - max(row["spans"]["train"][0], next_row["spans"]["rollout"][0])
        for row, next_row in itertools.pairwise(rows)
    ]
    assert sum(seconds > 0 for seconds in overlaps) >= ROLLOUTS - 5


def test_engine_and_trainer_agree_at_every_step(run_dir: Path) -> None:
    rows = metrics(run_dir)
    checks.check_consistency(rows)
    checks.check_documented(rows)


def test_engine_logprobs_equal_those_of_the_export(run_dir: Path) -> None:
    checks.check_export(run_dir, ROLLOUTS - 1, set(range(FROZEN_AFTER, ROLLOUTS)), 1.0)


def test_accuracy_rises(run_dir: Path) -> None:
    """The weights of the warm start sampled the first two rollouts."""
    accuracy = [row["rollout/accuracy"] for row in metrics(run_dir)[1:]]
    assert np.mean(accuracy[-8:]) > np.mean(accuracy[:2]) + 0.05
