"""The program printed in docs/library.md, with the calculator: the model learns to call it, and only model tokens are trained on."""

from __future__ import annotations

import re
import signal
from pathlib import Path

import numpy as np
import pytest

from slime_like.data.dump import load_groups, rollout_path
from slime_like.data.token_table import load_table, table_path
from slime_like.types import Sample, Source
from tests.e2e import checks
from tests.e2e.runs import REPOSITORY, Training, metrics
from tests.e2e.worker_server import forking_workers

pytestmark = pytest.mark.e2e
PROGRAM = re.compile(r"```python\n(.*?)```", re.DOTALL)
ROLLOUTS = 4


@pytest.fixture(scope="module")
def overrides(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, ...]:
    """Return the overrides of a job that begins with a warm start."""
    folder = tmp_path_factory.mktemp("library")
    return (
        "+recipe=quickstart_tool",
        f"data.train={folder / 'assets' / 'train.jsonl'}",
        f"model.hf_checkpoint={folder / 'sft' / 'hf'}",
        f"evaluation.datasets={{arithmetic: '{folder / 'assets' / 'heldout.jsonl'}@[0:100]'}}",
        f"run.dir={folder / 'run'}",
        "run.dump_rollouts=true",
        "evaluation.interval=null",
        f"loop.num_rollout={ROLLOUTS}",
        "optim.warmup_steps=0",
    )


def test_a_signal_during_the_warm_start_ends_it_with_its_parent(overrides: tuple[str, ...], tmp_path: Path) -> None:
    """The next test runs the warm start to its end."""
    log = tmp_path / "log"
    training = Training(*overrides, log=log, environment=forking_workers())
    training.wait_until(lambda: "quickstart_tool_sft: Ray is up" in log.read_text())
    training.record()
    assert training.resources.ports, "the ports of the child's Ray, whose absence is asserted below, were recorded"
    training.signal(signal.SIGTERM)
    result = training.wait()
    assert result.code == 130, result.output
    assert "the warm start was stopped by SIGTERM" in result.output and "Traceback" not in result.output
    assert training.leftovers() == []


def test_the_documented_program_teaches_a_tool(overrides: tuple[str, ...], tmp_path: Path) -> None:
    program = PROGRAM.search((REPOSITORY / "docs" / "library.md").read_text())
    assert program is not None
    (tmp_path / "program.py").write_text(program[1])
    run_dir = next(Path(text.removeprefix("run.dir=")) for text in overrides if text.startswith("run.dir="))
    script, log = str(tmp_path / "program.py"), tmp_path / "log"
    result = Training(*overrides, log=log, script=script, environment=forking_workers()).wait()
    assert result.code == 0, result.output
    assert "quickstart: warm start done" in result.output
    assert f"rollout {ROLLOUTS - 1}: version {ROLLOUTS}, best answer" in result.output
    rows = metrics(run_dir)
    checks.check_consistency(rows)
    checks.check_documented(rows)
    assert rows[0]["eval/arithmetic"] < 0.5, "the model mostly guesses"
    assert rows[-1]["eval/arithmetic"] > rows[0]["eval/arithmetic"] + 0.25
    assert rows[-1]["rollout/num_turns"] > rows[1]["rollout/num_turns"] + 0.2, "the model calls the tool more often"
    rewards = [row["rollout/raw_reward"] for row in rows[1:]]
    assert np.mean(rewards[-2:]) > rewards[0] + 0.1, "of what it samples, too"
    check_token_table(run_dir, ROLLOUTS - 1)


def check_token_table(run_dir: Path, rollout_id: int) -> None:
    """Check that the view has the calculator's tokens, without loss weight, advantage and engine log-probability."""
    view = load_table(table_path(run_dir / "rollouts", rollout_id))
    groups = load_groups(rollout_path(run_dir / "rollouts", rollout_id))
    samples: dict[int, Sample] = {sample.sample_id: sample for group in groups for sample in group.samples}
    num_calls = 0
    for index, sample_id in enumerate(view.sample_ids):
        sample, positions = samples[int(sample_id)], view.sequence(index)
        lengths = [span.stop - span.start for span in sample.spans]
        is_sampled = np.repeat([span.source is Source.MODEL for span in sample.spans], lengths)
        np.testing.assert_array_equal(view.token_ids[positions], sample.token_ids)
        np.testing.assert_array_equal(view.loss_weight[positions] > 0, is_sampled)
        np.testing.assert_array_equal(np.isnan(view.advantages[positions]), ~is_sampled)
        np.testing.assert_array_equal(np.isnan(view.rollout_logprobs[positions]), ~is_sampled)
        num_calls += sum(span.source is Source.TOOL for span in sample.spans)
    assert num_calls > 0
