"""The program of docs/library.md, as it is printed there, with the calculator: it learns to call it, and only that is trained on."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from slime_like.data.dump import load_groups, rollout_path
from slime_like.data.token_view import load_view, view_path
from slime_like.deadline import scale
from slime_like.types import Sample, Source
from tests.e2e import checks
from tests.e2e.runs import REPOSITORY, RUN_S, metrics

pytestmark = pytest.mark.e2e
PROGRAM = re.compile(r"```python\n(.*?)```", re.DOTALL)
ROLLOUTS = 6


def test_a_program_of_its_own_teaches_a_tool(tmp_path: Path) -> None:
    found = PROGRAM.search((REPOSITORY / "docs" / "library.md").read_text())
    assert found is not None
    (tmp_path / "mine.py").write_text(found[1])
    run_dir = tmp_path / "run"
    overrides = (
        "+recipe=quickstart_tool",
        f"data.train={tmp_path / 'assets' / 'train.jsonl'}",
        f"model.hf_checkpoint={tmp_path / 'sft' / 'hf'}",
        f"evaluation.datasets={{arithmetic: '{tmp_path / 'assets' / 'heldout.jsonl'}@[0:100]'}}",
        f"run.dir={run_dir}",
        "run.dump_rollouts=true",
        "evaluation.interval=null",
        f"loop.num_rollout={ROLLOUTS}",
        "optim.warmup_steps=0",
        "metrics.console=plain",
    )
    done = subprocess.run(
        [sys.executable, str(tmp_path / "mine.py"), *overrides],
        cwd=REPOSITORY,
        env=os.environ | {"HF_HUB_OFFLINE": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=RUN_S * scale(),
        check=False,
    )
    assert done.returncode == 0, done.stdout
    assert f"rollout {ROLLOUTS - 1}: version {ROLLOUTS}, best answer" in done.stdout
    rows = metrics(run_dir)
    checks.check_consistency(rows)
    checks.check_documented(rows)
    assert rows[0]["eval/arithmetic"] < 0.5, "it mostly guesses"
    assert rows[-1]["eval/arithmetic"] > rows[0]["eval/arithmetic"] + 0.25
    assert rows[-1]["rollout/num_turns"] > rows[1]["rollout/num_turns"] + 0.2, "because it calls"
    check_token_view(run_dir, ROLLOUTS - 1)


def check_token_view(run_dir: Path, rollout_id: int) -> None:
    """What the calculator wrote is in the view, with no weight, no advantage and no engine's log-probability."""
    view = load_view(view_path(run_dir / "rollouts", rollout_id))
    groups = load_groups(rollout_path(run_dir / "rollouts", rollout_id))
    samples: dict[int, Sample] = {sample.sample_id: sample for group in groups for sample in group.samples}
    called = 0
    for index, sample_id in enumerate(view.sample_ids):
        sample, place = samples[int(sample_id)], view.sequence(index)
        lengths = [span.stop - span.start for span in sample.spans]
        mine = np.repeat([span.source is Source.MODEL for span in sample.spans], lengths)
        np.testing.assert_array_equal(view.token_ids[place], sample.token_ids)
        np.testing.assert_array_equal(view.loss_weight[place] > 0, mine)
        np.testing.assert_array_equal(np.isnan(view.advantages[place]), ~mine)
        np.testing.assert_array_equal(np.isnan(view.rollout_logprobs[place]), ~mine)
        called += sum(span.source is Source.TOOL for span in sample.spans)
    assert called > 0
