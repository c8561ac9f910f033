"""run.mode=rollout_only with a user's generate function, filter, rewards and sink, until the death of its engine ends the run.

The data are those of examples/own_data.py. The run is started outside the repository, in the folder of the user's file.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest

from slime_like.data.dump import load_groups, rollout_path
from tests.e2e import checks, custom
from tests.e2e.conftest import SMALL_ROLLOUTS, WarmStart
from tests.e2e.runs import RunResult, Training, last_step, metrics, unwritable_home

pytestmark = pytest.mark.e2e
FILTER = "own_code.py:even_prompts"


@dataclass(frozen=True, slots=True)
class EndedRun:
    run_dir: Path
    result: RunResult


@pytest.fixture(scope="module")
def run(warm_start: WarmStart, tmp_path_factory: pytest.TempPathFactory) -> EndedRun:
    folder, heldout = tmp_path_factory.mktemp("rollout_only"), warm_start.folder / "assets" / "heldout.jsonl"
    run_dir = folder / "run"
    shutil.copy(custom.__file__, folder / "own_code.py")
    training = Training(
        "+recipe=quickstart",
        *warm_start.overrides,
        *SMALL_ROLLOUTS,
        f"evaluation.datasets={{greedy: '{heldout}@[0:20]', sampled: '{heldout}@[20:30]'}}",
        "evaluation.overrides.sampled={n_samples_per_prompt: 4, temperature: 0.7, rm_type: f1}",
        "run.mode=rollout_only",
        "run.dump_rollouts=true",
        f"run.dir={run_dir}",
        "loop.num_rollout=100000",
        "health.on_dead_engine=stop",
        r"reward.weights={rm_type: 1.0, own_code.py\:length: 1.0, tests.e2e.custom\:shortest: 0.5}",
        "run.prepare=examples/own_data.py:prepare",
        f"data.train={folder / 'own_data.jsonl'}",
        "rollout.generate=own_code:generate",
        "metrics.sinks=[examples.csv_sink:CsvSink]",
        f"rollout.filters=[{FILTER}]",
        "rollout.max_refills=20",
        log=folder / "rollout_only.log",
        environment=unwritable_home(),
        folder=folder,
    )
    training.wait_until(lambda: last_step(run_dir) >= 2)
    (engine,) = [p for p in psutil.Process(training.pid).children(recursive=True) if is_engine(p)]
    os.killpg(engine.pid, signal.SIGKILL)
    return EndedRun(run_dir, training.wait())


def is_engine(process: psutil.Process) -> bool:
    """Return whether a process is the living leader of an engine's process group."""
    try:
        return (
            "slime_like.rollout.engine.main" in " ".join(process.cmdline()) and os.getpgid(process.pid) == process.pid
        )
    except (psutil.Error, ProcessLookupError):
        return False


def is_of_run(process: psutil.Process, run_dir: Path) -> bool:
    """Return whether a living process has the run's folder on its command line."""
    try:
        return str(run_dir) in " ".join(process.cmdline()) and process.status() != psutil.STATUS_ZOMBIE
    except psutil.Error:
        return False


def test_a_dead_engine_ends_the_run_with_its_cause(run: EndedRun) -> None:
    assert run.result.code == 1, run.result.output
    assert re.search("Engine(Error|Lost): engine 0", run.result.output)
    assert "was killed by SIGKILL" in run.result.output
    (bundle,) = run.run_dir.glob("crash-*")
    assert re.match("Engine(Error|Lost): engine 0", (bundle / "cause.txt").read_text())
    file_names = {path.name for path in bundle.rglob("*")}
    assert {"traceback.txt", "versions.txt", "config.yaml", "engine_0.tail.txt"} <= file_names
    assert any(path.read_text() for path in (bundle / "stacks").glob("rollout_manager*"))
    assert not [p for p in psutil.process_iter() if is_of_run(p, run.run_dir)]


def test_every_rollout_is_of_the_first_weights(run: EndedRun) -> None:
    rows = metrics(run.run_dir)
    assert all(row["rollout/staleness_max"] == 0 for row in rows[1:])
    checks.check_documented(rows)


def test_groups_that_the_filter_drops_are_replaced(run: EndedRun) -> None:
    row, groups = metrics(run.run_dir)[1], load_groups(rollout_path(run.run_dir / "rollouts", 0))
    num_dropped = row[f"rollout/dropped_groups/{FILTER}"]
    assert len(groups) == 16
    assert all(group.prompt.prompt_id % 2 == 0 and len(group.samples) == 2 for group in groups)
    assert row["rollout/generated_groups"] == 16 + num_dropped > 16
    assert row["rollout/refills"] > 0
    assert row[f"rollout/dropped_groups/{FILTER}/odd prompt"] == num_dropped
    assert row["rollout/generated/raw_reward"] > 0


def test_a_users_sink_receives_every_step(run: EndedRun) -> None:
    steps = [line.partition(",")[0] for line in (run.run_dir / "metrics.csv").read_text().splitlines()]
    assert steps == ["step", *(str(row["step"]) for row in metrics(run.run_dir))]


def test_rewards_add_up_by_their_weights(run: EndedRun) -> None:
    for group in load_groups(rollout_path(run.run_dir / "rollouts", 0)):
        min_length = min(len(sample.text) for sample in group.samples)
        for s in group.samples:
            is_correct = s.text.strip() == group.prompt.label
            assert s.reward is not None and s.reward.accuracy == is_correct
            assert s.reward.score == is_correct + len(s.text) + 0.5 * (len(s.text) == min_length)


def test_every_answer_of_an_evaluation_is_kept(run: EndedRun) -> None:
    import pandas as pd

    answers = pd.read_json(run.run_dir / "eval" / "step_0000000.jsonl", lines=True)
    assert answers.groupby("dataset").size().to_dict() == {"greedy": 20, "sampled": 10 * 2}
    columns = {"step", "prompt", "label", "response", "score", "accuracy", "status", "response_len"}
    assert set(answers.columns) >= columns
    greedy = answers[answers.dataset == "greedy"]
    evaluated = metrics(run.run_dir)[0]
    assert greedy.accuracy.mean() == pytest.approx(evaluated["eval/greedy"])
    assert {"eval/greedy", "eval/sampled", "eval/sampled/response_len/max"} <= set(evaluated)
    # The generate function returns two of four samples; reward.weights does not apply to an evaluation.
    assert 0.0 <= evaluated["eval/sampled-pass@1"] <= evaluated["eval/sampled-pass@2"] <= 1.0
    assert "eval/sampled-pass@4" not in evaluated and "eval/greedy-pass@1" not in evaluated
    assert 0.0 <= evaluated["eval/sampled"] <= 1.0


def test_printed_lines_of_user_code_are_in_the_log(run: EndedRun) -> None:
    log = (run.run_dir / "logs" / "rollout_manager.log").read_text()
    assert "a generate function's own line\n" in log and "a reward's own line\n" in log
