"""Run folder with two checkpoints, written without a run, and functions that damage it."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np

from slime_like.checkpoint.files import (
    LATEST,
    iteration_folder,
    side_files,
    write_text,
)
from slime_like.checkpoint.record import Manifest, add_run, describe_files, write_manifest
from slime_like.cluster.start.identity import run_record
from slime_like.config.load.loader import to_yaml
from slime_like.config.schema.algo import GrpoConfig
from slime_like.config.schema.model import OptimConfig
from slime_like.config.schema.root import TrainConfig
from slime_like.config.schema.run import LoopConfig, RunConfig
from slime_like.data.dump import save_groups
from slime_like.types import Prompt, SampleGroup
from tests.config.model_folder import SHAPE, write_model


def config(run_dir: Path, *, resume: str = "auto", lr: float = 1e-3, num_rollout: int = 10) -> TrainConfig:
    base = TrainConfig(
        algo=GrpoConfig(),
        run=RunConfig(dir=str(run_dir), resume=resume),
        optim=OptimConfig(lr=lr),
        loop=LoopConfig(num_rollout=num_rollout),
    )
    return replace(
        base,
        model=replace(base.model, hf_checkpoint=str(run_dir / "model")),
        data=replace(base.data, train=str(run_dir / "train.jsonl") + "@[0:1]"),
        evaluation=base.evaluation,
    )


def used_folder(run_dir: Path, latest: str = "4") -> Path:
    """Write a run folder with checkpoints of iterations 2 and 4; the latest file names ``latest``."""
    checkpoints = run_dir / "checkpoints"
    for iteration in (2, 4):
        folder = iteration_folder(checkpoints, iteration)
        folder.mkdir(parents=True)
        (folder / "__0_0.distcp").write_bytes(b"x" * 100)
        (folder / "metadata.json").write_text("{}")
        rollout = {"groups": [], "started": 0.0, "stopped": 1.0, "num_generated": 1, "num_refills": 0}
        state = {
            "next_rollout": iteration,
            "cursor": {},
            "made": [{"rollout_id": iteration, **rollout}],
            "in_flight": 1,
        }
        write_text(checkpoints / "rollout" / f"state_{iteration}.json", json.dumps(state))
        for name in ("", f"_made_{iteration}", "_in_flight"):
            save_groups(checkpoints / "rollout" / f"leftover_{iteration}{name}.npz", (group("1 + 1"),))
        write_manifest(
            folder,
            Manifest(iteration, iteration, iteration, 1e-3, 0.0, True, {"tp": 1}, {**SHAPE, "padded_vocabulary": 128}),
            rollout=describe_files(checkpoints / "rollout", side_files(checkpoints, iteration)),
        )
    (checkpoints / LATEST).write_text(latest)
    write_model(run_dir / "model")
    (run_dir / "train.jsonl").write_text('{"input": "1 + 1", "label": "2"}\n')
    (run_dir / "metrics.jsonl").write_text('{"step": 1}\n')
    record_run(run_dir, config(run_dir))
    return run_dir


def record_run(run_dir: Path, cfg: TrainConfig) -> None:
    """Record ``cfg`` as the run that wrote the checkpoints."""
    (run_dir / "config.yaml").write_text(to_yaml(cfg))
    for iteration in (2, 4):
        add_run(iteration_folder(run_dir / "checkpoints", iteration), run_record(cfg))


def without_hashes(run_dir: Path) -> None:
    """Rewrite the records in format 1, which has sizes but no hashes."""
    for path in (run_dir / "checkpoints").glob("iter_*/checkpoint.json"):
        values = json.loads(path.read_text())
        files = {name: file["size"] for name, file in values["files"].items()}
        old = {key: values[key] for key in values if key not in ("rollout", "run", "sha256")}
        path.write_text(json.dumps({**old, "format": 1, "files": files}))


def shard(run_dir: Path) -> Path:
    return run_dir / "checkpoints" / "iter_0000004" / "__0_0.distcp"


def manifest(run_dir: Path) -> Path:
    return run_dir / "checkpoints" / "iter_0000004" / "checkpoint.json"


def side(run_dir: Path, name: str) -> Path:
    return run_dir / "checkpoints" / "rollout" / name


def flip(path: Path) -> None:
    """Flip one bit without changing the size."""
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def repack(path: Path) -> None:
    """Replace the groups by a valid file of another rollout."""
    save_groups(path, (group("1 + 2"),))


def group(text: str) -> SampleGroup:
    return SampleGroup(7, Prompt(3, np.array([1, 2], np.int32), text, None, None), ())
