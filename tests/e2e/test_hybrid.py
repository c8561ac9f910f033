"""+recipe=quickstart_gdn and quickstart_next, shortened: they learn, engine and trainer agree, the export is the model.

The first also on a trainer of two tensor parallel ranks and of two context parallel ones.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from tests.e2e import checks
from tests.e2e.conftest import Warm, warm_start
from tests.e2e.runs import REPOSITORY, metrics, train
from tests.e2e.test_colocated import is_of_run

pytestmark = pytest.mark.e2e
SFT_STEPS = 160
ROLLOUTS = 10
SMALL = ("rollout.batch_size=16", "rollout.n_samples_per_prompt=8")
# The learning rate is 0 after the last but one step: the weights that sampled the last rollout are those of the export.
SHAPE = ("optim.schedule=linear", "optim.min_lr=0", "optim.warmup_steps=0", f"optim.decay_steps={ROLLOUTS - 1}")
RISE = 0.2  # of 100 held-out problems: four times the standard error
RECIPES = ("quickstart_gdn", "quickstart_next")
LAYERS = {"attention", "gdn", "mlp", "all"}


@pytest.fixture(scope="module")
def warmed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Warm]:
    return {recipe: warm_start(tmp_path_factory.mktemp(recipe), f"{recipe}_sft", SFT_STEPS) for recipe in RECIPES}


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_hybrid_model_learns(recipe: str, warmed: dict[str, Warm], tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    done = train(
        f"+recipe={recipe}",
        *warmed[recipe].overrides,
        *SHAPE,
        f"run.dir={run_dir}",
        f"loop.num_rollout={ROLLOUTS}",
        "evaluation.interval=null",
        "run.save_hf=true",
        "run.dump_rollouts=true",
        log=tmp_path / "log",
    )
    assert done.code == 0, done.output
    rows = metrics(run_dir)
    checks.check_consistency(rows)
    checks.check_documented(rows)
    before, after = rows[0]["eval/arithmetic"], rows[-1]["eval/arithmetic"]
    assert after >= before + RISE, f"held-out accuracy {before} -> {after}"
    for row in rows:
        left = {name: row[f"probe/logprob_abs_diff_max/{name}"] for name in LAYERS}
        assert max(left.values()) <= checks.MAX_LOGPROB_DIFFERENCE
    checks.check_export(run_dir, ROLLOUTS - 1, {ROLLOUTS - 1}, temperature=1.0)


@pytest.mark.parametrize("layout", ["parallel.tp=2", "parallel.cp=2"])
def test_trainers_of_two_ranks_agree_with_the_engine(layout: str, warmed: dict[str, Warm], tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    done = train(
        "+recipe=quickstart_gdn",
        *warmed["quickstart_gdn"].overrides,
        *SMALL,
        layout,
        "optim.warmup_steps=0",
        "evaluation.datasets={}",
        f"run.dir={run_dir}",
        "loop.num_rollout=2",
        log=tmp_path / "log",
    )
    assert done.code == 0, done.output
    rows = metrics(run_dir)
    checks.check_consistency(rows)
    assert all(f"probe/logprob_abs_diff_mean/{name}" in rows[-1] for name in LAYERS)


def test_kernels_that_cannot_run_here_end_the_run_before_it_starts(tmp_path: Path) -> None:
    command = [
        "+recipe=quickstart_gdn",
        "--qwen-gdn-backend",
        "flashqla",
        "placement.device=cpu",
        f"run.dir={tmp_path}",
    ]
    done = subprocess.run(
        [sys.executable, str(REPOSITORY / "train.py"), *command],
        cwd=REPOSITORY,
        env=os.environ | {"HF_HUB_OFFLINE": "1"},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 2, done.stdout + done.stderr
    lines = [line for line in (done.stdout + done.stderr).splitlines() if line.strip()]
    assert len(lines) == 1 and "model.gdn.backend=flashqla" in lines[0], lines
    assert not [p for p in psutil.process_iter() if is_of_run(p, tmp_path)]
