"""A tiny deterministic job, and a comparison of two run folders. Shared by the tests and the soak scripts."""

from __future__ import annotations

import shutil
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import safe_open

from slime_like.data.dump import load_groups, rollout_path
from slime_like.quickstart.arithmetic import ArithmeticSpec, write_datasets
from slime_like.quickstart.model import ModelSpec, write_model
from tests.e2e.runs import metrics, train

SAMPLE_DIFFERENCE = "train/train_rollout_logprob_abs_diff_max"
PROBE_DIFFERENCE = "probe/logprob_abs_diff_max"
LOSS_TOLERANCE = 1e-6


def write_inputs(folder: Path) -> tuple[str, ...]:
    """Write a random model and ten prompts, so that epochs end within a run; return the job's overrides without ``run.dir``."""
    folder.mkdir(parents=True, exist_ok=True)
    write_datasets(folder, ArithmeticSpec())
    write_model(folder / "model", ModelSpec(hidden_size=64, intermediate_size=128, num_hidden_layers=2, head_dim=16))
    return (
        "+recipe=quickstart",
        "run.prepare=null",
        "run.deterministic=true",
        "run.save_interval=1",
        "run.save_hf=true",
        "run.dump_rollouts=true",
        f"model.hf_checkpoint={folder / 'model'}",
        f"data.train={folder / 'train.jsonl'}@[0:10]",
        "evaluation.datasets={}",
        "reward.name=tests.e2e.custom:digits",
        "reward.workers=1",
        "rollout.batch_size=4",
        "rollout.n_samples_per_prompt=4",
        "rollout.filters=[tests.e2e.custom:not_every_fourth]",
        "loop.leftover=carry",
        "optim.lr=3e-3",
        "optim.schedule=constant",
        "optim.warmup_steps=0",
    )


def run_reference(folder: Path, num_rollouts: int) -> tuple[tuple[str, ...], Path]:
    """Return a soak's job and the folder of its undisturbed run, which is started unless ``folder`` has its export."""
    job, reference = (*write_inputs(folder / "inputs"), f"loop.num_rollout={num_rollouts}"), folder / "whole"
    if not (reference / "hf" / "config.json").exists():
        shutil.rmtree(reference, ignore_errors=True)
        result = train(*job, f"run.dir={reference}", log=folder / "whole.log")
        if result.code:
            raise SystemExit(f"the undisturbed run failed:\n{result.output}")
    return job, reference


def differences(run_dir: Path, num_rollouts: int, *, reference: Path) -> list[str]:
    """Return a line per difference from ``reference``: samples and weights in any bit, losses beyond ``LOSS_TOLERANCE``."""
    problems = sample_differences(run_dir, range(num_rollouts), reference=reference)
    problems += _loss_differences(run_dir, reference)
    return [*problems, *weight_differences(run_dir / "hf", reference=reference / "hf")]


def sample_differences(run_dir: Path, rollouts: Iterable[int], *, reference: Path) -> list[str]:
    """Return a line per difference in samples: id, prompt, seed, tokens, log-probabilities, versions or reward."""
    problems: list[str] = []
    for k in rollouts:
        samples, expected = (list(_samples(folder, k)) for folder in (run_dir, reference))
        if len(samples) != len(expected):
            problems.append(f"rollout {k}: {len(samples)} samples instead of {len(expected)}")
        for a, b in zip(samples, expected, strict=False):
            problems += [f"rollout {k}, sample {a['id']}: {name}" for name in a if not equal_values(a[name], b[name])]
    return problems


def _samples(run_dir: Path, rollout_id: int) -> Iterator[dict[str, Any]]:
    for group in load_groups(rollout_path(run_dir / "rollouts", rollout_id)):
        for sample in group.samples:
            yield {
                "id": sample.sample_id,
                "prompt": group.prompt.prompt_id,
                "seed": sample.seed,
                "tokens": sample.token_ids,
                "logprobs": sample.logprobs,
                "versions": np.array(sample.versions),
                "reward": sample.reward.score if sample.reward else None,
            }


def equal_values(a: Any, b: Any) -> bool:
    """Return whether the values are equal; arrays in dtype, shape and every bit."""
    if not isinstance(a, np.ndarray) and not isinstance(b, np.ndarray):
        return a == b
    return type(a) is type(b) and (a.dtype, a.shape, a.tobytes()) == (b.dtype, b.shape, b.tobytes())


def _loss_differences(run_dir: Path, reference: Path) -> list[str]:
    losses, expected = (
        {row["step"]: row.get("train/loss") for row in metrics(folder)} for folder in (run_dir, reference)
    )
    if losses.keys() != expected.keys():
        return [f"metrics of steps {sorted(losses)} instead of {sorted(expected)}"]
    different_steps = [
        step
        for step, loss in losses.items()
        if not np.isclose(loss or 0.0, expected[step] or 0.0, rtol=0, atol=LOSS_TOLERANCE)
    ]
    return [f"loss of step {step}: {losses[step]} instead of {expected[step]}" for step in different_steps]


def weight_differences(folder: Path, *, reference: Path) -> list[str]:
    """Return a line per tensor that differs in dtype, shape or any bit between two HF folders."""
    tensors, expected = (safe_open(f / "model.safetensors", framework="np") for f in (folder, reference))
    names = sorted({*tensors.keys(), *expected.keys()})
    return [
        f"weight {name}"
        for name in names
        if name not in tensors.keys()  # noqa: SIM118 (a file, not a dict)
        or name not in expected.keys()  # noqa: SIM118
        or not equal_values(tensors.get_tensor(name), expected.get_tensor(name))
    ]
