"""A tiny deterministic job, and whether two run folders hold the same run. Shared by the tests and the soak scripts."""

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

DRIFT = "train/train_rollout_logprob_abs_diff_max"
PROBE = "probe/logprob_abs_diff_max"
LOSS = 1e-6


def write_inputs(folder: Path) -> tuple[str, ...]:
    """A random model, and ten prompts, so that epochs end within the run; returns the job's overrides but its folder."""
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


def undisturbed(folder: Path, num_rollouts: int) -> tuple[tuple[str, ...], Path]:
    """A soak's job, and the folder of its run that nothing happened to; made where ``folder`` does not hold it whole."""
    job, whole = (*write_inputs(folder / "inputs"), f"loop.num_rollout={num_rollouts}"), folder / "whole"
    if not (whole / "hf" / "config.json").exists():
        shutil.rmtree(whole, ignore_errors=True)
        done = train(*job, f"run.dir={whole}", log=folder / "whole.log")
        if done.code:
            raise SystemExit(f"the undisturbed run failed:\n{done.output}")
    return job, whole


def differences(run_dir: Path, other: Path, num_rollouts: int) -> list[str]:
    """What is not the same in two runs: prompts, seeds, tokens, log-probabilities, versions, rewards, losses, weights."""
    found = sample_differences(run_dir, other, range(num_rollouts))
    found += _loss_differences(run_dir, other)
    return [*found, *weight_differences(run_dir / "hf", other / "hf")]


def sample_differences(run_dir: Path, other: Path, rollouts: Iterable[int]) -> list[str]:
    """What is not the same in the samples of two runs."""
    found: list[str] = []
    for k in rollouts:
        mine, theirs = (list(_samples(folder, k)) for folder in (run_dir, other))
        if len(mine) != len(theirs):
            found.append(f"rollout {k}: {len(mine)} and {len(theirs)} samples")
        for a, b in zip(mine, theirs, strict=False):
            found += [f"rollout {k}, sample {a['id']}: {name}" for name in a if not _same(a[name], b[name])]
    return found


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


def _same(a: Any, b: Any) -> bool:
    return np.array_equal(a, b, equal_nan=True) if isinstance(a, np.ndarray) else a == b


def _loss_differences(run_dir: Path, other: Path) -> list[str]:
    mine, theirs = ({row["step"]: row.get("train/loss") for row in metrics(folder)} for folder in (run_dir, other))
    if mine.keys() != theirs.keys():
        return [f"metrics of steps {sorted(mine)} and {sorted(theirs)}"]
    far = [step for step, loss in mine.items() if not np.isclose(loss or 0.0, theirs[step] or 0.0, rtol=0, atol=LOSS)]
    return [f"loss of step {step}: {mine[step]} and {theirs[step]}" for step in far]


def weight_differences(folder: Path, other: Path) -> list[str]:
    """Tensors of two HF folders that differ in any bit."""
    mine, theirs = (safe_open(f / "model.safetensors", framework="np") for f in (folder, other))
    names = sorted({*mine.keys(), *theirs.keys()})
    return [
        f"weight {name}"
        for name in names
        if name not in mine.keys()  # noqa: SIM118 (a file, not a dict)
        or name not in theirs.keys()  # noqa: SIM118
        or mine.get_tensor(name).tobytes() != theirs.get_tensor(name).tobytes()
    ]
