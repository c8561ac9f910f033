"""+recipe=quickstart, shortened: Ctrl-C, resume, export, replay, and the faults that must end a run."""

from __future__ import annotations

import json
import os
import re
import signal
import threading
from collections.abc import Generator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import numpy as np
import psutil
import pytest

from slime_like.cluster.asking import ask
from slime_like.cluster.control import Request
from slime_like.cluster.status import read_status
from slime_like.config.collectives import OPS
from slime_like.config.load import load_config
from slime_like.config.rollout import DataConfig
from slime_like.data.dump import load_groups, rollout_path
from slime_like.data.prompts import FileSource, SourceContext
from slime_like.data.token_view import load_view, view_path
from tests.e2e import checks
from tests.e2e.conftest import Warm
from tests.e2e.custom import HOLD
from tests.e2e.runs import Finished, Training, last_step, metrics, train
from tests.report.pages import check_self_contained

pytestmark = pytest.mark.e2e
TEMPERATURE = 0.7
ROLLOUTS = 6
SMALL = ("rollout.batch_size=16", "rollout.n_samples_per_prompt=8")
# The learning rate is 0 from the fourth step on: the weights that sampled the last rollout are those of the export.
FROZEN_AFTER = 3
SHAPE = ("optim.schedule=linear", "optim.min_lr=0", "optim.warmup_steps=0", f"optim.decay_steps={FROZEN_AFTER}")


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
            ask(run_dir, request)
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


def outcomes(run_dir: Path) -> dict[str, str]:
    """What became of each request so far."""
    status = read_status(run_dir)
    return {} if status is None else {answer.request: answer.state for answer in status.requests}


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


def test_rollout_only_with_parts_of_ones_own_until_a_file_stops_it(warm: Warm, tmp_path: Path) -> None:
    heldout, run_dir = warm.folder / "assets" / "heldout.jsonl", tmp_path / "run"
    training = Training(
        "+recipe=quickstart",
        *warm.overrides,
        *SMALL,
        *SHAPE,
        f"evaluation.datasets={{greedy: '{heldout}@[0:20]', sampled: '{heldout}@[20:30]'}}",
        "evaluation.overrides.sampled={n_samples_per_prompt: 4, temperature: 0.7, rm_type: f1}",
        "run.mode=rollout_only",
        "run.dump_rollouts=true",
        f"run.dir={run_dir}",
        "loop.num_rollout=100000",
        r"reward.weights={rm_type: 1.0, tests.e2e.custom\:length: 1.0, tests.e2e.custom\:shortest: 0.5}",
        "rollout.generate=tests.e2e.custom:generate",
        "rollout.filters=[tests.e2e.custom:even_prompts]",
        "rollout.max_refills=20",
        log=tmp_path / "rollout_only.log",
    )
    training.wait_until(lambda: last_step(run_dir) >= 2)
    ask(run_dir, Request.STOP)
    done = training.wait()
    assert done.code == 130, done.output
    last = last_step(run_dir)
    assert outcomes(run_dir) == {Request.STOP: "done"} and f"stopped after {last} rollouts" in done.output
    rows = metrics(run_dir)[1:]
    groups = load_groups(rollout_path(run_dir / "rollouts", 0))
    dropped = rows[0]["rollout/dropped_groups/tests.e2e.custom:even_prompts"]
    assert len(groups) == 16  # what the filter drops is replaced
    assert rows[0]["rollout/generated_groups"] == 16 + dropped > 16
    assert rows[0]["rollout/refills"] > 0
    assert all(group.prompt.prompt_id % 2 == 0 and len(group.samples) == 2 for group in groups)
    for group in groups:
        least = min(len(sample.text) for sample in group.samples)
        for s in group.samples:
            right = s.text.strip() == group.prompt.label
            assert s.reward is not None and s.reward.accuracy == right
            assert s.reward.score == right + len(s.text) + 0.5 * (len(s.text) == least)
    assert all(row["rollout/staleness_max"] == 0 for row in rows)
    evaluated = metrics(run_dir)[0]
    assert {"eval/greedy", "eval/sampled", "eval/sampled/response_len/max"} <= set(evaluated)
    # The generate function makes two of the four; what reward.weights adds is no part of an evaluation.
    assert 0.0 <= evaluated["eval/sampled-pass@1"] <= evaluated["eval/sampled-pass@2"] <= 1.0
    assert "eval/sampled-pass@4" not in evaluated and "eval/greedy-pass@1" not in evaluated
    assert 0.0 <= evaluated["eval/sampled"] <= 1.0
    checks.check_documented(metrics(run_dir))


def test_a_push_that_never_happened_ends_the_run_and_a_reward_server_that_fails_does_not(
    warm: Warm, tmp_path: Path
) -> None:
    with scoring(answers=100) as url:
        done = train(
            "+recipe=quickstart",
            *warm.overrides,
            *SMALL,
            "evaluation.datasets={}",
            "rollout.temperature=1.0",
            "rollout.over_sampling_batch_size=24",
            "rollout.partial_rollout=true",
            "weights.debug_skip_push_at=2",
            "reward.name=remote_rm",
            f"reward.remote_url={url}",
            "reward.remote_retries=0",
            "chaos.faults=[reward_down:collect:1]",
            "chaos.slow_s=600",
            f"run.dir={tmp_path / 'run'}",
            log=tmp_path / "skip.log",
        )
    assert done.code == 1
    assert "ConsistencyError: after the push of version 2 engine and trainer disagree" in done.output
    assert "Traceback" not in done.output
    assert last_step(tmp_path / "run") == 1
    checks.check_consistency(metrics(tmp_path / "run"))
    (row,) = metrics(tmp_path / "run")[1:]
    assert row["rollout/num_samples"] == 16 * 8
    assert row["rollout/stopped_groups"] == 24 - 16
    assert row["rollout/wasted_tokens"] == 0
    assert (
        16 * 8 - 100 <= row["reward/fallbacks"] <= row["reward/remote_failures"]
    )  # a group stopped meanwhile has none
    assert f"warning: the reward server {url} does not score (HTTP 503" in done.output
    assert re.search(
        r"reward_down:collect:1:0 on reward server: noticed after \d+\.\d s \(down: Cannot connect to host 127\.0\.0\.1.*"
        r"has not answered since, \d+ samples without its score",
        done.output,
    )


@contextmanager
def scoring(answers: int) -> Generator[str]:
    """A reward server that answers so many requests, and then that it is down."""
    left = iter(range(answers))

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            score = (
                None
                if next(left, None) is None
                else str(sum(map(int, filter(str.isdigit, asked["response"]))) % 5).encode()
            )
            with suppress(BrokenPipeError):  # the rollout is full, and asks for nothing more
                self.send_response(503 if score is None else 200)
                self.end_headers()
                self.wfile.write(score or b"down")

        def log_message(self, format: str, *args: object) -> None:
            """Says nothing."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}/score"
        finally:
            server.shutdown()
            thread.join()


def test_a_dead_engine_ends_the_run_with_its_cause(warm: Warm, tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    training = Training(
        "+recipe=quickstart",
        *warm.overrides,
        *SMALL,
        "evaluation.datasets={}",
        f"run.dir={run_dir}",
        "loop.num_rollout=100000",
        "health.on_dead_engine=stop",
        log=tmp_path / "death.log",
    )
    training.wait_until(lambda: last_step(run_dir) >= 1)
    (engine,) = [p for p in psutil.Process(training.pid).children(recursive=True) if is_engine(p)]
    os.killpg(engine.pid, signal.SIGKILL)
    done = training.wait()
    assert done.code == 1
    assert re.search("Engine(Error|Lost): engine 0", done.output)
    assert "was killed by SIGKILL" in done.output
    (bundle,) = run_dir.glob("crash-*")
    assert re.match("Engine(Error|Lost): engine 0", (bundle / "cause.txt").read_text())
    found = {path.name for path in bundle.rglob("*")}
    assert {"traceback.txt", "versions.txt", "config.yaml", "engine_0.tail.txt"} <= found
    assert any(path.read_text() for path in (bundle / "stacks").glob("trainer_rank0*"))
    assert not [p for p in psutil.process_iter() if is_of_run(p, run_dir)]


def is_engine(process: psutil.Process) -> bool:
    """Whether a process is the leader of an engine's group; one that has ended is not."""
    try:
        return "slime_like.rollout.server" in " ".join(process.cmdline()) and os.getpgid(process.pid) == process.pid
    except (psutil.Error, ProcessLookupError):
        return False


def is_of_run(process: psutil.Process, run_dir: Path) -> bool:
    """Whether a living process names the run's folder."""
    try:
        return str(run_dir) in " ".join(process.cmdline()) and process.status() != psutil.STATUS_ZOMBIE
    except psutil.Error:
        return False


def test_the_report_tells_of_the_run(run: Done) -> None:
    html = (run.run_dir / "report.html").read_text()
    text = " ".join(check_self_contained(html).text)
    for words in ("Trainer and engine", "arithmetic", "train_wait", "highest peak, GiB", "Sampled tokens"):
        assert words in text
    assert f"Rollout {ROLLOUTS - 1}, scored by the trainer's version {ROLLOUTS - 1}" in text
    assert f"{ROLLOUTS} of {ROLLOUTS} rollouts trained on" in text


def test_samples_are_kept_as_the_trainer_saw_them(run: Done) -> None:
    """Before a rollout is trained on, trainer and engine hold the same weights: their log-probabilities are equal."""
    for rollout_id in range(ROLLOUTS):
        view = load_view(view_path(run.run_dir / "rollouts", rollout_id))
        sampled = view.versions >= 0
        assert view.version == rollout_id
        assert set(view.versions[sampled].tolist()) == {rollout_id}
        difference = np.abs(view.trainer_logprobs - view.rollout_logprobs)[sampled]
        assert difference.max() <= checks.MAX_LOGPROB_DIFFERENCE
        assert np.array_equal(view.loss_weight > 0, sampled), "every sampled token is trained on, and no other"
        assert np.array_equal(np.isfinite(view.advantages), sampled)
