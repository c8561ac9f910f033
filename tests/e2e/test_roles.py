"""A student learns from its teacher, and a critic learns what the student's rollouts return."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from slime_like.data.dump import rollout_path
from slime_like.data.token_view import load_view, view_path
from tests.e2e import checks
from tests.e2e.conftest import Warm
from tests.e2e.runs import metrics, train

pytestmark = pytest.mark.e2e
ROLLOUTS = 16
REPLAYED = 24
SMALL = ("evaluation.datasets={}", "rollout.batch_size=16", "rollout.n_samples_per_prompt=8", "optim.schedule=constant")


@pytest.fixture(scope="module")
def distilled(warm: Warm, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A student, which is its teacher with noise on every weight, trained by the teacher alone."""
    folder = tmp_path_factory.mktemp("distill")
    teacher = warm.folder / "sft" / "hf"
    shutil.copytree(teacher, folder / "student")
    weights = load_file(folder / "student" / "model.safetensors")
    generator = torch.Generator().manual_seed(0)
    for name, weight in weights.items():
        if weight.ndim == 2:
            noise = torch.randn(weight.shape, generator=generator)
            weights[name] = weight + 0.5 * weight.std() * noise
    save_file(weights, folder / "student" / "model.safetensors", metadata={"format": "pt"})
    done = train(
        "+recipe=quickstart",
        *warm.overrides,
        *SMALL,
        "algo=distill",
        "algo.kl_loss_coef=0",
        f"model.hf_checkpoint={folder / 'student'}",
        f"teacher.hf_checkpoint={teacher}",
        "optim.lr=1e-4",
        f"run.dir={folder / 'run'}",
        f"loop.num_rollout={ROLLOUTS}",
        "run.dump_rollouts=true",
        log=folder / "run.log",
    )
    assert done.code == 0, done.output
    return folder / "run"


def test_the_student_comes_nearer_to_its_teacher(distilled: Path) -> None:
    rows = metrics(distilled)
    checks.check_consistency(rows)
    checks.check_documented(rows)
    kl = [row["train/teacher_kl"] for row in rows if "train/teacher_kl" in row]
    assert len(kl) == ROLLOUTS
    assert np.mean(kl[-4:]) < 0.6 * np.mean(kl[:4])
    view = load_view(view_path(distilled / "rollouts", ROLLOUTS - 1))
    trained = view.loss_weight > 0
    assert trained.any() and np.array_equal(np.isfinite(view.advantages), trained), "each token's own, of the ranks"
    assert len(np.unique(view.advantages[trained])) > len(view.sample_ids)


def test_a_critic_learns_what_rollouts_return(distilled: Path, warm: Warm, tmp_path: Path) -> None:
    """One rollout again and again, without an engine; the actor joins in for the last two."""
    (tmp_path / "rollouts").mkdir()
    for k in range(REPLAYED):
        os.link(rollout_path(distilled / "rollouts", ROLLOUTS - 1), rollout_path(tmp_path / "rollouts", k))
    done = train(
        "+recipe=quickstart",
        *warm.overrides,
        *SMALL,
        "algo=ppo",
        "algo.kl_loss_coef=0",
        "algo.lambd=0.95",
        "critic.lr=1e-3",
        f"critic.warmup_rollouts={REPLAYED - 2}",
        "optim.lr=3e-4",
        "optim.warmup_steps=0",
        "run.mode=train_only",
        f"run.replay_from={tmp_path / 'rollouts'}",
        f"loop.num_rollout={REPLAYED}",
        f"run.dir={tmp_path / 'run'}",
        log=tmp_path / "run.log",
    )
    assert done.code == 0, done.output
    rows = [row for row in metrics(tmp_path / "run") if "train/value_loss" in row]
    checks.check_documented(rows)
    assert len(rows) == REPLAYED
    assert ["train/grad_norm" in row for row in rows] == [False] * (REPLAYED - 2) + [True] * 2
    assert np.mean([row["train/value_loss"] for row in rows[-3:]]) < 0.75 * rows[0]["train/value_loss"]
    assert rows[-1]["train/explained_variance"] > 0.2
    assert (tmp_path / "run" / "checkpoints" / "critic" / f"iter_{REPLAYED:07d}" / "checkpoint.json").is_file()
