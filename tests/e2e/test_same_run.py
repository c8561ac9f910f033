"""``run.deterministic=true``: engine and trainer agree in every bit, and a run that was killed ends as one that was not."""

from __future__ import annotations

import random
from dataclasses import dataclass
from pathlib import Path

import pytest

from slime_like.config.kill_at import PHASES
from tests.e2e.runs import metrics, train
from tests.e2e.same_run import DRIFT, PROBE, differences, weight_differences, write_inputs

pytestmark = pytest.mark.e2e
ROLLOUTS = 5
SEED = 1


@dataclass(frozen=True, slots=True)
class Pair:
    whole: Path
    killed: Path
    inputs: Path


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    """One run undisturbed; the same command killed twice, at points that a seed chose, and continued each time."""
    folder = tmp_path_factory.mktemp("same_run")
    job = (*write_inputs(folder / "inputs"), f"loop.num_rollout={ROLLOUTS}", "rollout.temperature=0.7")
    made = Pair(folder / "whole", folder / "killed", folder / "inputs")
    done = train(*job, f"run.dir={made.whole}", log=folder / "whole.log")
    assert done.code == 0, done.output
    rng = random.Random(SEED)
    for i, phase in enumerate(rng.sample(PHASES, 2)):
        point = f"run.debug_kill_at={phase}:{1 + 2 * i}:{rng.uniform(0, 0.1):.3f}"
        dead = train(*job, f"run.dir={made.killed}", point, log=folder / f"killed{i}.log")
        assert dead.code == -9, f"{point}: {dead.output}"
    done = train(*job, f"run.dir={made.killed}", log=folder / "resumed.log")
    assert done.code == 0, done.output
    return made


def test_every_token_of_every_step_has_the_same_bits_on_both_sides(pair: Pair) -> None:
    for run_dir in (pair.whole, pair.killed):
        rows = [row for row in metrics(run_dir) if row["step"] > 0]
        assert [row[PROBE] for row in rows] == [0.0] * ROLLOUTS
        drifts = [row[DRIFT] for row in rows if DRIFT in row]
        assert len(drifts) >= 2
        assert set(drifts) == {0.0}


def test_a_killed_run_is_the_same_run(pair: Pair) -> None:
    assert differences(pair.whole, pair.killed, ROLLOUTS) == []


def test_the_run_learns_so_that_sameness_says_something(pair: Pair) -> None:
    assert len(weight_differences(pair.inputs / "model", pair.whole / "hf")) > 10
