"""A student is distilled from a teacher of a different shape, and a critic is fitted to the student's rollouts."""

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

from slime_like.cluster.run.control import Request
from slime_like.cluster.run.control_client import send_request
from slime_like.data.dump import rollout_path
from slime_like.data.token_table import TokenTable, load_table, table_path
from tests.e2e import checks
from tests.e2e.conftest import WarmStart
from tests.e2e.runs import Training, last_step, metrics, outcomes
from tests.e2e.worker_server import forking_workers

pytestmark = pytest.mark.e2e
ROLLOUTS = 10
MIN_REPLAYS = 8
MAX_REPLAYS = 200  # many more than are trained on before the request to stop takes effect
ACTOR_STARTS = 6
SMALL_RUN = (
    "evaluation.datasets={}",
    "rollout.batch_size=16",
    "rollout.n_samples_per_prompt=8",
    "optim.schedule=constant",
)


def write_larger_teacher(folder: Path) -> None:
    """Rewrite the model in another shape that computes the same function.

    It gets one more layer, which adds zero, and MLPs twice as wide, whose second half has zero output weights.
    """
    path = folder / "config.json"
    config: dict[str, Any] = json.loads(path.read_text())
    layers, width = config["num_hidden_layers"], config["intermediate_size"]
    config |= {"num_hidden_layers": layers + 1, "intermediate_size": 2 * width}
    if "layer_types" in config:
        config["layer_types"].append(config["layer_types"][-1])
    path.write_text(json.dumps(config))
    weights = load_file(folder / "model.safetensors")
    last_layer = {name: weight for name, weight in weights.items() if name.startswith(f"model.layers.{layers - 1}.")}
    for name, weight in last_layer.items():
        new_weight = (
            torch.zeros_like(weight) if name.endswith(("o_proj.weight", "down_proj.weight")) else weight.clone()
        )
        weights[name.replace(f".{layers - 1}.", f".{layers}.")] = new_weight
    for name, weight in weights.items():
        if name.endswith(("gate_proj.weight", "up_proj.weight")):
            weights[name] = torch.cat([weight, weight])
        elif name.endswith("down_proj.weight"):
            weights[name] = torch.cat([weight, torch.zeros_like(weight)], dim=1)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


def add_noise(folder: Path) -> None:
    """Add noise to every matrix."""
    weights = load_file(folder / "model.safetensors")
    generator = torch.Generator().manual_seed(0)
    for name, weight in weights.items():
        if weight.ndim == 2:
            weights[name] = weight + 0.5 * weight.std() * torch.randn(weight.shape, generator=generator)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


@pytest.fixture(scope="module")
def distill_dir(warm_start: WarmStart, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the run folder of a student with a noisy copy of its teacher's weights, trained only by distillation."""
    folder = tmp_path_factory.mktemp("distill")
    for name, change in (("student", add_noise), ("teacher", write_larger_teacher)):
        change(Path(shutil.copytree(warm_start.hf, folder / name)))
    training = Training(
        "+recipe=quickstart",
        *warm_start.overrides,
        *SMALL_RUN,
        "algo=distill",
        "algo.kl_loss_coef=0",
        f"model.hf_checkpoint={folder / 'student'}",
        f"teacher.hf_checkpoint={folder / 'teacher'}",
        "optim.lr=2e-4",
        f"run.dir={folder / 'run'}",
        f"loop.num_rollout={ROLLOUTS}",
        "run.dump_rollouts=true",
        log=folder / "run.log",
        environment=forking_workers(),
    )
    result = training.wait()
    assert result.code == 0, result.output
    check_listeners(training)
    return folder / "run"


def check_listeners(training: Training) -> None:
    """Check that a rank of another role listened, and that no resource was left behind or open to other users."""
    owners = set[str]().union(*training.resources.owners.values())
    assert any(owner.startswith("ray::RoleWorker") for owner in owners), owners
    assert training.leftovers() == []


def test_distillation_reduces_the_kl_to_a_teacher_of_another_shape(distill_dir: Path) -> None:
    rows = metrics(distill_dir)
    checks.check_consistency(rows)
    checks.check_documented(rows)
    kl = [row["train/teacher_kl"] for row in rows if "train/teacher_kl" in row]
    assert len(kl) == ROLLOUTS
    assert np.mean(kl[-4:]) < 0.6 * np.mean(kl[:4])
    assert list((distill_dir / "stacks").glob("teacher_rank0.*")), "the teacher has a separate process"


def test_advantages_are_teacher_minus_student_logprobs(distill_dir: Path) -> None:
    from transformers import AutoModelForCausalLM  # takes seconds

    teacher = AutoModelForCausalLM.from_pretrained(distill_dir.parent / "teacher", dtype=torch.float32)
    for rollout_id in (0, ROLLOUTS - 1):
        view = load_table(table_path(distill_dir / "rollouts", rollout_id))
        trained_T = view.loss_weight > 0
        assert trained_T.any() and np.array_equal(np.isfinite(view.advantages), trained_T), (
            "each token's own, of the ranks"
        )
        assert np.abs(view.advantages[trained_T]).max() > 100 * checks.MAX_LOGPROB_DIFFERENCE
        teacher_logprobs = (view.trainer_logprobs + view.advantages)[trained_T]
        assert np.abs(teacher_logprobs - logprobs(teacher, view)[trained_T]).max() <= checks.MAX_LOGPROB_DIFFERENCE


def logprobs(model: Any, view: TokenTable) -> np.ndarray:
    """Return the [T] log-probabilities of transformers, NaN at the first token of each sequence."""
    out = np.full(len(view.token_ids), np.nan, np.float32)
    for index in range(len(view.sample_ids)):
        positions = view.sequence(index)
        ids_1T = torch.from_numpy(view.token_ids[positions].astype(np.int64))[None]
        with torch.no_grad():
            columns_TV = torch.log_softmax(model(input_ids=ids_1T).logits[0, :-1], -1)
        out[positions.start + 1 : positions.stop] = columns_TV.gather(1, ids_1T[0, 1:, None])[:, 0].numpy()
    return out


def test_a_critic_learns_the_returns_of_rollouts(distill_dir: Path, warm_start: WarmStart, tmp_path: Path) -> None:
    """The run replays copies of one rollout, without an engine, until a request stops it. The actor starts to learn late."""
    (tmp_path / "rollouts").mkdir()
    for k in range(MAX_REPLAYS):
        os.link(rollout_path(distill_dir / "rollouts", ROLLOUTS - 1), rollout_path(tmp_path / "rollouts", k))
    run_dir = tmp_path / "run"
    training = Training(
        "+recipe=quickstart",
        *warm_start.overrides,
        *SMALL_RUN,
        "algo=ppo",
        "algo.kl_loss_coef=0",
        "algo.lambd=0.95",
        "critic.lr=2e-3",
        f"critic.warmup_rollouts={ACTOR_STARTS}",
        "optim.lr=3e-4",
        "optim.warmup_steps=0",
        "run.mode=train_only",
        f"run.replay_from={tmp_path / 'rollouts'}",
        f"loop.num_rollout={MAX_REPLAYS}",
        f"run.dir={run_dir}",
        log=tmp_path / "run.log",
        environment=forking_workers(),
    )
    training.wait_until(lambda: last_step(run_dir) >= MIN_REPLAYS)
    send_request(run_dir, Request.STOP)
    result = training.wait()
    assert result.code == 130, result.output
    assert outcomes(run_dir) == {Request.STOP: "done"}
    num_replays = last_step(run_dir)
    assert f"stopped after {num_replays} rollouts" in result.output
    check_listeners(training)
    rows = [row for row in metrics(run_dir) if "train/value_loss" in row]
    checks.check_documented(rows)
    assert len(rows) == num_replays < MAX_REPLAYS
    assert ["train/grad_norm" in row for row in rows] == [k >= ACTOR_STARTS for k in range(num_replays)]
    assert np.mean([row["train/value_loss"] for row in rows[-3:]]) < 0.75 * rows[0]["train/value_loss"]
    assert rows[-1]["train/explained_variance"] > 0.2
    assert (run_dir / "checkpoints" / "critic" / f"iter_{num_replays:07d}" / "checkpoint.json").is_file()
