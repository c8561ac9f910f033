"""+recipe=quickstart, shortened, with two optimizer steps per rollout: requests, Ctrl-C, resume, export, replay, report."""

from __future__ import annotations

import os
import signal
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

from slime_like.cluster.run.control import Request
from slime_like.cluster.run.control_client import send_request
from slime_like.config.load.loader import load_config
from slime_like.config.schema.collectives import OPS
from slime_like.config.schema.rollout import DataConfig
from slime_like.data.prompts import FileSource, SourceContext
from slime_like.data.token_table import load_table, table_path
from tests.e2e import checks
from tests.e2e.conftest import SMALL_ROLLOUTS, WarmStart
from tests.e2e.custom import HOLD_FOLDER
from tests.e2e.runs import RunResult, Training, last_step, metrics, outcomes, train
from tests.e2e.worker_server import forking_workers
from tests.report.pages import check_self_contained

pytestmark = pytest.mark.e2e
TEMPERATURE = 0.7
ROLLOUTS = 6
STEPS = 2  # optimizer steps of a rollout
# The learning rate is 0 after this many rollouts, so the weights that sampled the last rollout are the exported weights.
FROZEN_AFTER = 3
SHAPE = (
    f"loop.steps_per_rollout={STEPS}",
    *("optim.schedule=linear", "optim.min_lr=0", "optim.warmup_steps=0", f"optim.decay_steps={STEPS * FROZEN_AFTER}"),
)


@dataclass(frozen=True, slots=True)
class StoppedAndResumed:
    run_dir: Path
    stopped: RunResult
    resumed: RunResult


@pytest.fixture(scope="module")
def run(warm_start: WarmStart, tmp_path_factory: pytest.TempPathFactory) -> StoppedAndResumed:
    """Return a run that receives every request after its first step, is stopped by Ctrl-C and resumed by the same command.

    The rollout waits while the requests are written, so that the run reads all of them before the next rollout. Ctrl-C is sent
    when a rollout begins; the rollout after it waits, so that the run cannot end before the signal.
    """
    folder = tmp_path_factory.mktemp("colocated")
    run_dir, hold = folder / "run", folder / "hold"
    hold.mkdir()
    command = (
        "+recipe=quickstart",
        *warm_start.overrides,
        *SMALL_ROLLOUTS,
        *SHAPE,
        f"run.dir={run_dir}",
        f"loop.num_rollout={ROLLOUTS}",
        f"rollout.temperature={TEMPERATURE}",
        "run.save_hf=true",
        "run.dump_rollouts=true",
        "rollout.generate=tests.e2e.custom:wait_at_step",
    )
    environment, log = forking_workers() | {HOLD_FOLDER: str(hold)}, folder / "first.log"
    hold_after(hold, 1)
    first = Training(*command, log=log, environment=environment)
    try:
        first.wait_until((hold / "waits1").exists)
        os.kill(first.pid, signal.SIGUSR2)  # a save
        for request in (Request.EVAL, Request.REPORT):
            send_request(run_dir, request)
        (run_dir / "control" / "sav").touch()
        request_step = last_step(run_dir)
        hold_after(hold, request_step + 1)
        first.wait_until((hold / f"waits{request_step + 1}").exists)
        first.wait_until(lambda: outcomes(run_dir).get(Request.REPORT, "seen") != "seen")
        hold_after(hold, request_step + 2)
        first.wait_until((hold / f"goes{request_step + 1}").exists)
        first.interrupt()
        first.wait_until(lambda: "stopping after this rollout" in log.read_text())
    finally:
        (hold / "after").unlink()
    first_result = first.wait()
    resumed = train(*command, log=folder / "second.log", environment=environment)
    return StoppedAndResumed(run_dir, first_result, resumed)


def hold_after(hold: Path, step: int) -> None:
    """Let rollouts continue until this step is logged."""
    (hold / "new").write_text(str(step))
    (hold / "new").replace(hold / "after")


def test_ctrl_c_leaves_a_checkpoint_and_resume_ends_the_run(run: StoppedAndResumed) -> None:
    assert run.stopped.code == 130, run.stopped.output
    assert "run.resume=auto" in run.stopped.output
    assert run.resumed.code == 0, run.resumed.output
    assert [row["step"] for row in metrics(run.run_dir)] == list(range(ROLLOUTS + 1))
    marker = run.run_dir / "checkpoints" / "latest_checkpointed_iteration.txt"
    assert marker.read_text().strip() == str(ROLLOUTS)


def test_requests_are_carried_out_between_two_rollouts(run: StoppedAndResumed) -> None:
    output = run.stopped.output
    for text in (
        "eval: done: arithmetic 0.",
        "save: done: checkpoints/iter_",
        "report: done: report.html",
        "'sav': unknown",
    ):
        assert f"control: {text}" in output, output
    eval_steps = [row["step"] for row in metrics(run.run_dir) if "eval/arithmetic" in row]
    assert len(eval_steps) == 3 and eval_steps[0] == 0 and eval_steps[-1] == ROLLOUTS, (
        "one more than the interval gives"
    )
    assert f"checkpoints/iter_{eval_steps[1]:07d}" in output, (
        "the save is of the rollout after which the request was read"
    )
    assert (run.run_dir / "checkpoints" / f"iter_{eval_steps[1]:07d}" / "checkpoint.json").is_file()


def test_engine_and_trainer_agree_at_every_step(run: StoppedAndResumed) -> None:
    rows = metrics(run.run_dir)
    checks.check_consistency(rows)
    checks.check_documented(rows)


def test_the_old_policy_of_every_step_is_the_policy_before_the_rollouts_first_step(run: StoppedAndResumed) -> None:
    """Ratios to the old policy change with the weights, and are 1 while the weights are frozen."""
    rows = metrics(run.run_dir)[1:]
    assert all(row["perf/log_probs_time"] > 0 for row in rows)
    moving, frozen = rows[: FROZEN_AFTER - 1], rows[FROZEN_AFTER:]
    assert min(abs(row["train/ppo_kl"]) for row in moving) > 1e-3
    assert max(abs(row["train/ppo_kl"]) for row in frozen) < 1e-6
    assert [row["train/lr"] for row in frozen] == [0.0] * len(frozen)


def test_the_guard_does_not_query_memory_at_every_collective(run: StoppedAndResumed) -> None:
    checks.check_guard(metrics(run.run_dir))


def test_engine_logprobs_equal_those_of_the_export(run: StoppedAndResumed) -> None:
    checks.check_export(run.run_dir, ROLLOUTS - 1, set(range(FROZEN_AFTER, ROLLOUTS)), TEMPERATURE)


def test_the_first_and_last_step_are_evaluated(run: StoppedAndResumed) -> None:
    rows = metrics(run.run_dir)
    assert "eval/arithmetic" in rows[0]
    assert "eval/arithmetic" in rows[-1]
    assert all(row["rollout/staleness_max"] == 0 for row in rows[1:])


def test_resume_takes_the_next_prompts(run: StoppedAndResumed, warm_start: WarmStart) -> None:
    assert checks.prompt_ids(run.run_dir, ROLLOUTS) == expected_prompts(warm_start, ROLLOUTS * 16)


def expected_prompts(warm_start: WarmStart, n: int) -> list[int]:
    """Return the first ``n`` prompt ids of an undisturbed run."""
    from transformers import AutoTokenizer

    path = str(warm_start.folder / "assets" / "train.jsonl")
    tokenizer = AutoTokenizer.from_pretrained(warm_start.folder / "sft" / "hf")
    source = FileSource(DataConfig(train=path), SourceContext(path, tokenizer, 64, lambda rm_type: True, seed=0))
    return [prompt.prompt_id for prompt in source.next(n)]


def test_a_replay_trains_on_the_same_rollouts(run: StoppedAndResumed, warm_start: WarmStart, tmp_path: Path) -> None:
    """The replay also measures its collectives, and prints a table of them and a guard policy."""
    replay = Training(
        *("--steps", str(FROZEN_AFTER), "--out", str(tmp_path / "measured")),
        "+recipe=quickstart",
        *warm_start.overrides,
        *SMALL_ROLLOUTS,
        *SHAPE,
        "evaluation.datasets={}",
        f"rollout.temperature={TEMPERATURE}",
        "run.mode=train_only",
        f"run.replay_from={run.run_dir / 'rollouts'}",
        f"run.dir={tmp_path / 'run'}",
        log=tmp_path / "replay.log",
        script="scripts/profile_comm.py",
        environment=forking_workers(),
    ).wait()
    assert replay.code == 0, replay.output
    header = "| op | group | ranks | calls | bytes per call | first use: allocator drop |"
    table = replay.output[replay.output.index(header) :].splitlines()
    assert any(line.startswith("| all_reduce | ") and " | 1 | " in line for line in table), table
    measured_policy = (tmp_path / "measured" / "guard" / "measured.yaml").read_text()
    assert (
        measured_policy in replay.output
        and f"{FROZEN_AFTER} rollouts of train.py +recipe=quickstart" in measured_policy
    )
    cfg = load_config(["+recipe=quickstart", "--config-dir", str(tmp_path / "measured"), "guard=measured"], files=False)
    assert cfg.guard.ops.keys() == {op.name for op in OPS}
    rows, replayed = metrics(run.run_dir)[1:][:FROZEN_AFTER], metrics(tmp_path / "run")[-FROZEN_AFTER:]
    for name in ("rollout/raw_reward", "train/pg_loss", "train/grad_norm"):
        assert [row[name] for row in replayed] == pytest.approx([row[name] for row in rows], rel=1e-5, abs=1e-7)


def test_the_report_describes_the_run(run: StoppedAndResumed) -> None:
    html = (run.run_dir / "report.html").read_text()
    text = " ".join(check_self_contained(html).text)
    for expected in ("Trainer and engine", "arithmetic", "train_wait", "highest peak, GiB", "Sampled tokens"):
        assert expected in text
    assert f"Rollout {ROLLOUTS - 1}, scored by the trainer's version {ROLLOUTS - 1}" in text
    assert f"{ROLLOUTS} of {ROLLOUTS} rollouts, {ROLLOUTS} of them trained on" in text


def test_token_views_hold_equal_logprobs_of_trainer_and_engine(run: StoppedAndResumed) -> None:
    """Before the first step on a rollout, trainer and engine have the same weights."""
    for rollout_id in range(ROLLOUTS):
        view = load_table(table_path(run.run_dir / "rollouts", rollout_id))
        is_sampled = view.versions >= 0
        assert view.version == rollout_id
        assert set(view.versions[is_sampled].tolist()) == {rollout_id}
        difference = np.abs(view.trainer_logprobs - view.rollout_logprobs)[is_sampled]
        assert difference.max() <= checks.MAX_LOGPROB_DIFFERENCE
        assert np.array_equal(view.loss_weight > 0, is_sampled), "exactly the sampled tokens are trained on"
        assert np.array_equal(np.isfinite(view.advantages), is_sampled)
