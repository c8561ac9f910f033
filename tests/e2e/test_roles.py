"""A student learns from a teacher of another shape, and a critic learns what the student's rollouts return."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from slime_like.data.dump import rollout_path
from slime_like.data.token_table import TokenTable, load_table, table_path
from tests.e2e import checks
from tests.e2e.conftest import Warm
from tests.e2e.runs import Training, metrics

pytestmark = pytest.mark.e2e
ROLLOUTS = 16
REPLAYED = 24
SMALL = ("evaluation.datasets={}", "rollout.batch_size=16", "rollout.n_samples_per_prompt=8", "optim.schedule=constant")


def grow(folder: Path) -> None:
    """The same function by another shape: a layer more, which adds nothing, and MLPs twice as wide, half of them unread."""
    path = folder / "config.json"
    config: dict[str, Any] = json.loads(path.read_text())
    layers, width = config["num_hidden_layers"], config["intermediate_size"]
    config |= {"num_hidden_layers": layers + 1, "intermediate_size": 2 * width}
    if "layer_types" in config:
        config["layer_types"].append(config["layer_types"][-1])
    path.write_text(json.dumps(config))
    weights = load_file(folder / "model.safetensors")
    last = {name: weight for name, weight in weights.items() if name.startswith(f"model.layers.{layers - 1}.")}
    for name, weight in last.items():
        added = torch.zeros_like(weight) if name.endswith(("o_proj.weight", "down_proj.weight")) else weight.clone()
        weights[name.replace(f".{layers - 1}.", f".{layers}.")] = added
    for name, weight in weights.items():
        if name.endswith(("gate_proj.weight", "up_proj.weight")):
            weights[name] = torch.cat([weight, weight])
        elif name.endswith("down_proj.weight"):
            weights[name] = torch.cat([weight, torch.zeros_like(weight)], dim=1)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


def disturb(folder: Path) -> None:
    """Noise on every matrix."""
    weights = load_file(folder / "model.safetensors")
    generator = torch.Generator().manual_seed(0)
    for name, weight in weights.items():
        if weight.ndim == 2:
            weights[name] = weight + 0.5 * weight.std() * torch.randn(weight.shape, generator=generator)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


@pytest.fixture(scope="module")
def distilled(warm: Warm, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A student with a noisy copy of its teacher's weights, trained by the teacher alone, which has ranks of its own."""
    folder = tmp_path_factory.mktemp("distill")
    for name, change in (("student", disturb), ("teacher", grow)):
        change(Path(shutil.copytree(warm.hf, folder / name)))
    training = Training(
        "+recipe=quickstart",
        *warm.overrides,
        *SMALL,
        "algo=distill",
        "algo.kl_loss_coef=0",
        f"model.hf_checkpoint={folder / 'student'}",
        f"teacher.hf_checkpoint={folder / 'teacher'}",
        "optim.lr=1e-4",
        f"run.dir={folder / 'run'}",
        f"loop.num_rollout={ROLLOUTS}",
        "run.dump_rollouts=true",
        log=folder / "run.log",
    )
    done = training.wait()
    assert done.code == 0, done.output
    check_listeners(training)
    return folder / "run"


def check_listeners(training: Training) -> None:
    """A rank of another role was seen to listen, and nothing of the run to be open to others."""
    assert any(owner.startswith("ray::RoleWorker") for owner in training.held.owners.values())
    assert training.leftovers() == []


def test_the_student_comes_nearer_to_a_teacher_of_another_shape(distilled: Path) -> None:
    rows = metrics(distilled)
    checks.check_consistency(rows)
    checks.check_documented(rows)
    kl = [row["train/teacher_kl"] for row in rows if "train/teacher_kl" in row]
    assert len(kl) == ROLLOUTS
    assert np.mean(kl[-4:]) < 0.6 * np.mean(kl[:4])
    assert list((distilled / "stacks").glob("teacher_rank0.*")), "a process of its own"


def test_advantages_are_what_the_teacher_thinks_of_each_token(distilled: Path) -> None:
    teacher = AutoModelForCausalLM.from_pretrained(distilled.parent / "teacher", dtype=torch.float32)
    for rollout_id in (0, ROLLOUTS - 1):
        view = load_table(table_path(distilled / "rollouts", rollout_id))
        trained = view.loss_weight > 0
        assert trained.any() and np.array_equal(np.isfinite(view.advantages), trained), "each token's own, of the ranks"
        assert np.abs(view.advantages[trained]).max() > 100 * checks.MAX_LOGPROB_DIFFERENCE
        found = (view.trainer_logprobs + view.advantages)[trained]
        assert np.abs(found - logprobs(teacher, view)[trained]).max() <= checks.MAX_LOGPROB_DIFFERENCE


def logprobs(model: Any, view: TokenTable) -> np.ndarray:
    """[T] of each sequence's tokens given those before, nan at its first, by transformers."""
    out = np.full(len(view.token_ids), np.nan, np.float32)
    for index in range(len(view.sample_ids)):
        where = view.sequence(index)
        ids_1T = torch.from_numpy(view.token_ids[where].astype(np.int64))[None]
        with torch.no_grad():
            columns_TV = torch.log_softmax(model(input_ids=ids_1T).logits[0, :-1], -1)
        out[where.start + 1 : where.stop] = columns_TV.gather(1, ids_1T[0, 1:, None])[:, 0].numpy()
    return out


def test_a_critic_learns_what_rollouts_return(distilled: Path, warm: Warm, tmp_path: Path) -> None:
    """One rollout again and again, without an engine; the actor joins in for the last two."""
    (tmp_path / "rollouts").mkdir()
    for k in range(REPLAYED):
        os.link(rollout_path(distilled / "rollouts", ROLLOUTS - 1), rollout_path(tmp_path / "rollouts", k))
    training = Training(
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
    done = training.wait()
    assert done.code == 0, done.output
    check_listeners(training)
    rows = [row for row in metrics(tmp_path / "run") if "train/value_loss" in row]
    checks.check_documented(rows)
    assert len(rows) == REPLAYED
    assert ["train/grad_norm" in row for row in rows] == [False] * (REPLAYED - 2) + [True] * 2
    assert np.mean([row["train/value_loss"] for row in rows[-3:]]) < 0.75 * rows[0]["train/value_loss"]
    assert rows[-1]["train/explained_variance"] > 0.2
    assert (tmp_path / "run" / "checkpoints" / "critic" / f"iter_{REPLAYED:07d}" / "checkpoint.json").is_file()
