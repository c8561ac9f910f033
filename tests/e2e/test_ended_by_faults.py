"""Runs that a fault must end, or must not, by what the driver says and leaves behind."""

from __future__ import annotations

import json
import os
import re
import signal
import threading
from collections.abc import Generator
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import psutil
import pytest

from tests.e2e import checks
from tests.e2e.conftest import SMALL, Warm
from tests.e2e.runs import Training, last_step, metrics, train

pytestmark = pytest.mark.e2e


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
    checks.check_skipped_push(done, tmp_path / "run")
    assert "Traceback" not in done.output
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


def test_a_step_on_what_was_not_sampled_is_not_taken(warm: Warm, tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    done = train(
        "+recipe=quickstart",
        *warm.overrides,
        *SMALL,
        "evaluation.datasets={}",
        "rollout.generate=tests.e2e.custom:shifted",
        "loop.steps_per_rollout=2",
        "run.save_interval=1",
        "run.async_save=false",
        f"run.dir={run_dir}",
        log=tmp_path / "shifted.log",
    )
    assert done.code == 1, done.output
    assert "ConsistencyError: samples of the rollout that weights of version 1 generated" in done.output
    named = re.search(r"largest in samples (\d+) \(\S+\), (\d+) \(\S+\), (\d+) ", done.output)
    assert named is not None and all(128 <= int(sample_id) < 256 for sample_id in named.groups()), done.output
    assert "Traceback" not in done.output
    assert last_step(run_dir) == 1
    checks.check_consistency(metrics(run_dir))
    marker = run_dir / "checkpoints" / "latest_checkpointed_iteration.txt"
    assert marker.read_text().strip() == "1", "of the weights before the step"


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
        return (
            "slime_like.rollout.engine.main" in " ".join(process.cmdline()) and os.getpgid(process.pid) == process.pid
        )
    except (psutil.Error, ProcessLookupError):
        return False


def is_of_run(process: psutil.Process, run_dir: Path) -> bool:
    """Whether a living process names the run's folder."""
    try:
        return str(run_dir) in " ".join(process.cmdline()) and process.status() != psutil.STATUS_ZOMBIE
    except psutil.Error:
        return False
