"""``run.deterministic=true``: engine and trainer agree in every bit, and a run whose driver, ranks and engines were killed or
stopped in various phases ends with the same samples, losses, evaluations and weights as an undisturbed run.

The undisturbed run has one rollout manager and one engine, the disturbed one two managers with an engine each.
"""

from __future__ import annotations

import random
import re
import signal
from dataclasses import dataclass
from pathlib import Path

import pytest

from slime_like.cluster.run.eval_files import answers_path
from slime_like.cluster.run.rollout_state import manager_states, read_state
from slime_like.data.faults import read
from slime_like.util.deadline import scale
from tests.e2e.runs import RunResult, Training, metrics, train
from tests.e2e.same_run import PROBE_DIFFERENCE, SAMPLE_DIFFERENCE, differences, weight_differences, write_inputs
from tests.e2e.worker_server import forking_workers

pytestmark = pytest.mark.e2e
PHASES = ("collect", "step", "push", "save")
ROLLOUTS = 5
SEED = 9  # kills the driver in save and a rank in push
STEP_S = 10.0  # deadline of a phase where a rank is stopped
NOTICED_S = 60.0  # limit from a rank's death, or from a deadline, to the crash bundle; the default deadlines are 1800 s and more


@dataclass(frozen=True, slots=True)
class Pair:
    reference: Path
    disturbed: Path
    inputs: Path
    job: tuple[str, ...]
    parts: tuple[RunResult, ...]  # parts of the disturbed run


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    """Run a job undisturbed, and once with faults at points drawn from a seed, resumed after each fault that ends the run."""
    folder = tmp_path_factory.mktemp("same_run")
    job = (*write_inputs(folder / "inputs"), f"loop.num_rollout={ROLLOUTS}", "rollout.temperature=0.7")
    job = (*job, f"evaluation.datasets.held={folder / 'inputs' / 'heldout.jsonl'}@[0:5]", "evaluation.interval=2")
    reference, disturbed = folder / "whole", folder / "killed"
    # This driver is not forked: those of the disturbed run have another hash seed.
    result = train(*job, f"run.dir={reference}", log=folder / "whole.log", environment=forking_workers(driver=False))
    assert result.code == 0, result.output
    rng = random.Random(SEED)
    first, second = rng.sample(PHASES, 2)
    faults = (
        f"kill_driver:{first}:1:{rng.uniform(0, 0.1):.3f}",
        f"kill_engine:collect:2:0.05,kill_rank:{second}:3:{rng.uniform(0, 0.1):.3f}",
        "slow_engine:collect:3,stop_rank:step:3",
        "stop_engine:collect:4",
    )
    offload = ("placement.offload_train=true", "placement.offload_rollout=true")  # offload does not change results
    managers = ("rollout.num_managers=2", "rollout.num_engines=2")
    fast_health = ("health.interval_s=0.5", "health.first_wait_s=0", "chaos.slow_s=0.5")
    short_deadlines = (f"loop.step_deadline_s={STEP_S}", f"weights.push_deadline_s={STEP_S}")
    settings = {2: short_deadlines, 3: ("health.timeout_s=3",)}  # for the parts in which a process is stopped
    parts = tuple(
        train(
            *(*job, *managers, *offload, *fast_health, *settings.get(i, ())),
            *(f"run.dir={disturbed}", f"chaos.faults=[{faults_of_part}]"),
            log=folder / f"part{i}.log",
            environment=forking_workers(),
        )
        for i, faults_of_part in enumerate(faults)
    )
    return Pair(reference, disturbed, folder / "inputs", job, parts)


def test_each_fault_ends_the_run_or_is_survived(pair: Pair) -> None:
    assert [part.code for part in pair.parts] == [1, 1, 1, 0], [part.output[-2000:] for part in pair.parts]
    driver, rank, slow_engine, engine = (part.output for part in pair.parts)
    assert re.search(r"ProcessLost: the driver \(process \d+\) was killed by SIGKILL", driver)
    assert "trainer rank 0 died in phase" in rank
    assert re.search("slow_engine:collect:3:0 on engine [01]: no engine was lost", slow_engine)
    assert re.search("kill_engine:collect:2:0.05 on engine [01]: noticed after", rank)
    assert re.search("stop_engine:collect:4:0 on engine [01]: noticed after", engine)
    injections, recoveries = read(pair.disturbed)
    assert [injection.fault.split(":")[0] for injection in injections] == [
        "kill_driver",
        *("kill_engine", "kill_rank"),
        *("slow_engine", "stop_rank"),
        "stop_engine",
    ]
    assert [recovery.joined > recovery.up > recovery.noticed for recovery in recoveries] == [True] * 2
    assert [recovery.version >= min_version for recovery, min_version in zip(recoveries, (2, 4), strict=True)] == [
        True
    ] * 2
    assert "was killed by SIGKILL" in recoveries[0].cause
    assert recoveries[1].cause.startswith("stalled: ")
    restarts = [row["rollout/engine_restarts"] for row in metrics(pair.disturbed) if row["step"] > 0]
    assert sum(restarts) >= 1  # rows of rollouts that a later part repeated are replaced
    html = (pair.disturbed / "report.html").read_text()
    assert "stop_engine:collect:4:0" in html


def test_a_rank_that_dies_or_stops_is_reported_within_its_deadline(pair: Pair) -> None:
    injection_times = [injection.time for injection in read(pair.disturbed)[0] if "_rank" in injection.fault]
    causes = [bundle / "cause.txt" for bundle in sorted(pair.disturbed.glob("crash-*"))]
    driver, dead_rank, stopped_rank = (cause.read_text() for cause in causes)
    assert "ProcessLost: the driver" in driver
    assert "WorkerError: trainer rank 0 died in phase" in dead_rank
    assert re.search(r"DeadlineExceeded: driver waited \d+ s for trainer rank 0 in phase", stopped_rank)
    for fault_time, cause, deadline in zip(injection_times, causes[1:], (0.0, STEP_S), strict=True):
        assert cause.stat().st_mtime - fault_time < (deadline + NOTICED_S) * scale()


def test_every_token_of_every_step_has_the_same_bits_on_both_sides(pair: Pair) -> None:
    for run_dir in (pair.reference, pair.disturbed):
        rows = [row for row in metrics(run_dir) if row["step"] > 0]
        assert [row[PROBE_DIFFERENCE] for row in rows] == [0.0] * ROLLOUTS
        drifts = [row[SAMPLE_DIFFERENCE] for row in rows if SAMPLE_DIFFERENCE in row]
        assert len(drifts) >= 2
        assert set(drifts) == {0.0}


def test_a_disturbed_run_equals_the_undisturbed_run(pair: Pair) -> None:
    assert differences(pair.disturbed, ROLLOUTS, reference=pair.reference) == []
    for num_trained in (0, 2, 4, ROLLOUTS):
        answers = [answers_path(run_dir, num_trained).read_text() for run_dir in (pair.reference, pair.disturbed)]
        assert answers[0] == answers[1] and answers[0].count("\n") == 5
    evaluations = [
        {
            row["step"]: {name: value for name, value in row.items() if name.startswith("eval/")}
            for row in metrics(run_dir)
        }
        for run_dir in (pair.reference, pair.disturbed)
    ]
    assert evaluations[0] == evaluations[1] and all(evaluations[0][step] for step in (0, 2, 4, ROLLOUTS))


def test_each_manager_has_its_own_process_and_files(pair: Pair) -> None:
    for index in range(2):
        assert (pair.disturbed / "logs" / f"rollout_manager_{index}.log").exists()
    assert [path.name for path in (pair.reference / "logs").glob("rollout_manager*")] == ["rollout_manager.log"]
    state = read_state(pair.disturbed / "checkpoints", ROLLOUTS)
    assert len(manager_states(state)) == 2


def test_a_checkpoint_of_two_managers_is_not_continued_by_one(pair: Pair, tmp_path: Path) -> None:
    result = train(
        *(*pair.job, f"run.dir={tmp_path / 'run'}", f"loop.num_rollout={ROLLOUTS + 1}"),
        f"run.resume={pair.disturbed / 'checkpoints'}",
        log=tmp_path / "log",
        environment=forking_workers(),
    )
    assert result.code != 0
    assert "saved with rollout.num_managers=2, and cannot be continued with 1" in result.output
    assert "set rollout.num_managers=2" in result.output and "Traceback" not in result.output


def test_training_changes_the_weights(pair: Pair) -> None:
    assert len(weight_differences(pair.reference / "hf", reference=pair.inputs / "model")) > 10


def test_a_second_signal_ends_the_start_at_once(pair: Pair, tmp_path: Path) -> None:
    log, run_dir = tmp_path / "log", tmp_path / "run"
    training = Training(*pair.job, f"run.dir={run_dir}", log=log)
    for number, answer in ((signal.SIGTERM, "stopping after this rollout"), (signal.SIGINT, "second SIGINT")):
        training.wait_until(lambda: "Ray is up" in log.read_text())
        training.signal(number)
        training.wait_until(lambda text=answer: text in log.read_text())
    result = training.wait()
    assert result.code == 130, result.output
    assert "Traceback" not in result.output
    assert training.leftovers() == []
    assert not list(run_dir.glob("crash-*"))
