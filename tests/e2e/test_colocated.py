"""+recipe=quickstart, shortened, two optimizer steps per rollout: requests, Ctrl-C, resume, export, replay, report."""

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
from tests.e2e.conftest import SMALL, Warm
from tests.e2e.custom import HOLD
from tests.e2e.runs import Finished, Training, last_step, metrics, outcomes, train
from tests.report.pages import check_self_contained

pytestmark = pytest.mark.e2e
TEMPERATURE = 0.7
ROLLOUTS = 6
STEPS = 2  # optimizer steps of a rollout
# The learning rate is 0 after so many rollouts: the weights that sampled the last one are those of the export.
FROZEN_AFTER = 3
SHAPE = (
    f"loop.steps_per_rollout={STEPS}",
    *("optim.schedule=linear", "optim.min_lr=0", "optim.warmup_steps=0", f"optim.decay_steps={STEPS * FROZEN_AFTER}"),
)


@dataclass(frozen=True, slots=True)
class Done:
    run_dir: Path
    stopped: Finished
    finished: Finished


@pytest.fixture(scope="module")
def run(warm: Warm, tmp_path_factory: pytest.TempPathFactory) -> Done:
    """Asked for everything after its first step, stopped by Ctrl-C, then continued by the same command.

    A rollout is held back while it is asked, so that all is seen before the next one. Ctrl-C comes as one begins, and the
    one after it is held back, so that the run does not end by itself before.
    """
    folder = tmp_path_factory.mktemp("colocated")
    run_dir, hold = folder / "run", folder / "hold"
    hold.mkdir()
    command = (
        "+recipe=quickstart",
        *warm.overrides,
        *SMALL,
        *SHAPE,
        f"run.dir={run_dir}",
        f"loop.num_rollout={ROLLOUTS}",
        f"rollout.temperature={TEMPERATURE}",
        "run.save_hf=true",
        "run.dump_rollouts=true",
        "rollout.generate=tests.e2e.custom:held",
    )
    environment, log = {HOLD: str(hold)}, folder / "first.log"
    hold_after(hold, 1)
    first = Training(*command, log=log, environment=environment)
    try:
        first.wait_until((hold / "waits1").exists)
        os.kill(first.pid, signal.SIGUSR2)  # a save
        for request in (Request.EVAL, Request.REPORT):
            send_request(run_dir, request)
        (run_dir / "control" / "sav").touch()
        asked = last_step(run_dir)
        hold_after(hold, asked + 1)
        first.wait_until((hold / f"waits{asked + 1}").exists)
        first.wait_until(lambda: outcomes(run_dir).get(Request.REPORT, "seen") != "seen")
        hold_after(hold, asked + 2)
        first.wait_until((hold / f"goes{asked + 1}").exists)
        first.interrupt()
        first.wait_until(lambda: "stopping after this rollout" in log.read_text())
    finally:
        (hold / "after").unlink()
    return Done(run_dir, first.wait(), train(*command, log=folder / "second.log", environment=environment))


def hold_after(hold: Path, step: int) -> None:
    """Let rollouts go on until this step is logged."""
    (hold / "new").write_text(str(step))
    (hold / "new").replace(hold / "after")


def test_ctrl_c_leaves_a_checkpoint_and_resume_ends_the_run(run: Done) -> None:
    assert run.stopped.code == 130, run.stopped.output
    assert "run.resume=auto" in run.stopped.output
    assert run.finished.code == 0, run.finished.output
    assert [row["step"] for row in metrics(run.run_dir)] == list(range(ROLLOUTS + 1))
    marker = run.run_dir / "checkpoints" / "latest_checkpointed_iteration.txt"
    assert marker.read_text().strip() == str(ROLLOUTS)


def test_a_run_does_what_it_is_asked_for_between_two_rollouts(run: Done) -> None:
    said = run.stopped.output
    for words in (
        "eval: done: arithmetic 0.",
        "save: done: checkpoints/iter_",
        "report: done: report.html",
        "'sav': unknown",
    ):
        assert f"control: {words}" in said, said
    asked = [row["step"] for row in metrics(run.run_dir) if "eval/arithmetic" in row]
    assert len(asked) == 3 and asked[0] == 0 and asked[-1] == ROLLOUTS, "one more than are due"
    assert f"checkpoints/iter_{asked[1]:07d}" in said, "of the rollout at which it was seen"
    assert (run.run_dir / "checkpoints" / f"iter_{asked[1]:07d}" / "checkpoint.json").is_file()


def test_engine_and_trainer_agree_at_every_step(run: Done) -> None:
    rows = metrics(run.run_dir)
    checks.check_consistency(rows)
    checks.check_documented(rows)


def test_later_steps_of_a_rollout_are_measured_against_the_policy_before_its_first(run: Done) -> None:
    """That is scored once per rollout: ratios move with the weights, and are 1 where these are frozen."""
    rows = metrics(run.run_dir)[1:]
    assert all(row["perf/log_probs_time"] > 0 for row in rows)
    moving, frozen = rows[: FROZEN_AFTER - 1], rows[FROZEN_AFTER:]
    assert min(abs(row["train/ppo_kl"]) for row in moving) > 1e-3
    assert max(abs(row["train/ppo_kl"]) for row in frozen) < 1e-6
    assert [row["train/lr"] for row in frozen] == [0.0] * len(frozen)


def test_the_guard_takes_a_thousandth_of_the_time_at_most(run: Done) -> None:
    checks.check_guard(metrics(run.run_dir))


def test_engine_logprobs_are_those_of_the_export(run: Done) -> None:
    checks.check_export(run.run_dir, ROLLOUTS - 1, set(range(FROZEN_AFTER, ROLLOUTS)), TEMPERATURE)


def test_evaluation_frames_the_run(run: Done) -> None:
    rows = metrics(run.run_dir)
    assert "eval/arithmetic" in rows[0]
    assert "eval/arithmetic" in rows[-1]
    assert all(row["rollout/staleness_max"] == 0 for row in rows[1:])


def test_resume_takes_the_next_prompts(run: Done, warm: Warm) -> None:
    assert checks.prompt_ids(run.run_dir, ROLLOUTS) == expected_prompts(warm, ROLLOUTS * 16)


def expected_prompts(warm: Warm, n: int) -> list[int]:
    """The first ``n`` prompts of an undisturbed run."""
    from transformers import AutoTokenizer

    path = str(warm.folder / "assets" / "train.jsonl")
    tokenizer = AutoTokenizer.from_pretrained(warm.folder / "sft" / "hf")
    source = FileSource(DataConfig(train=path), SourceContext(path, tokenizer, 64, lambda rm_type: True, seed=0))
    return [prompt.prompt_id for prompt in source.next(n)]


def test_a_replay_trains_on_the_same_rollouts(run: Done, warm: Warm, tmp_path: Path) -> None:
    """As a run whose collectives are measured, which ends with a table of them and a policy for each."""
    replay = Training(
        *("--steps", str(FROZEN_AFTER), "--out", str(tmp_path / "measured")),
        "+recipe=quickstart",
        *warm.overrides,
        *SMALL,
        *SHAPE,
        "evaluation.datasets={}",
        f"rollout.temperature={TEMPERATURE}",
        "run.mode=train_only",
        f"run.replay_from={run.run_dir / 'rollouts'}",
        f"run.dir={tmp_path / 'run'}",
        log=tmp_path / "replay.log",
        script="scripts/profile_comm.py",
    ).wait()
    assert replay.code == 0, replay.output
    header = "| op | group | ranks | calls | bytes per call | first use: allocator drop |"
    table = replay.output[replay.output.index(header) :].splitlines()
    assert any(line.startswith("| all_reduce | ") and " | 1 | " in line for line in table), table
    written = (tmp_path / "measured" / "guard" / "measured.yaml").read_text()
    assert written in replay.output and f"{FROZEN_AFTER} rollouts of train.py +recipe=quickstart" in written
    cfg = load_config(["+recipe=quickstart", "--config-dir", str(tmp_path / "measured"), "guard=measured"], files=False)
    assert cfg.guard.ops.keys() == {op.name for op in OPS}
    first, again = metrics(run.run_dir)[1:][:FROZEN_AFTER], metrics(tmp_path / "run")[-FROZEN_AFTER:]
    for name in ("rollout/raw_reward", "train/pg_loss", "train/grad_norm"):
        assert [row[name] for row in again] == pytest.approx([row[name] for row in first], rel=1e-5, abs=1e-7)


def test_the_report_tells_of_the_run(run: Done) -> None:
    html = (run.run_dir / "report.html").read_text()
    text = " ".join(check_self_contained(html).text)
    for words in ("Trainer and engine", "arithmetic", "train_wait", "highest peak, GiB", "Sampled tokens"):
        assert words in text
    assert f"Rollout {ROLLOUTS - 1}, scored by the trainer's version {ROLLOUTS - 1}" in text
    assert f"{ROLLOUTS} of {ROLLOUTS} rollouts, {ROLLOUTS} of them trained on" in text


def test_samples_are_kept_as_the_trainer_saw_them(run: Done) -> None:
    """Before a rollout is trained on, trainer and engine hold the same weights: their log-probabilities are equal."""
    for rollout_id in range(ROLLOUTS):
        view = load_table(table_path(run.run_dir / "rollouts", rollout_id))
        sampled = view.versions >= 0
        assert view.version == rollout_id
        assert set(view.versions[sampled].tolist()) == {rollout_id}
        difference = np.abs(view.trainer_logprobs - view.rollout_logprobs)[sampled]
        assert difference.max() <= checks.MAX_LOGPROB_DIFFERENCE
        assert np.array_equal(view.loss_weight > 0, sampled), "every sampled token is trained on, and no other"
        assert np.array_equal(np.isfinite(view.advantages), sampled)
