"""Where a run starts: afresh, or from the checkpoint that ``run.resume`` names. Decided before any process starts."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

from slime_like.checkpoint_files import (
    CRITIC,
    LATEST,
    Manifest,
    iteration_folder,
    latest_iteration,
    read_manifest,
)
from slime_like.cluster.rollouts import read_state
from slime_like.config.load import from_yaml
from slime_like.config.role_algo import PpoConfig
from slime_like.config.role_rules import check_critic
from slime_like.config.root import TrainConfig
from slime_like.config.saved_model import check_saved_model
from slime_like.errors import CheckpointError, ConfigError, RunComplete

# What may change between the parts of one run without making it another experiment.
FREE_GROUPS = ("run", "metrics", "evaluation", "placement", "parallel", "weights", "guard", "health", "chaos")
FIXED_KEYS = ("run.seed", "run.deterministic")
FREE_KEYS = (
    "loop.num_rollout",
    "loop.step_deadline_s",
    "rollout.num_engines",
    "rollout.tp",
    "rollout.max_running_requests",
    "rollout.start_deadline_s",
    "rollout.request_deadline_s",
    "reward.workers",
    "reward.timeout_s",
    "reward.remote_url",
    "reward.remote_retries",
    "reward.remote_concurrency",
    *(f"{role}.{name}" for role in ("critic", "teacher") for name in ("tp", "pp", "cp", "dp", "placement")),
)
SHOWN = 4


def checkpoint_folder(cfg: TrainConfig, run_dir: Path) -> Path:
    """Where this run's checkpoints lie, or those it was told to resume from."""
    return run_dir / "checkpoints" if cfg.run.resume in ("auto", "never") else Path(cfg.run.resume)


def first_rollout(cfg: TrainConfig, run_dir: Path) -> int:
    """How many rollouts the checkpoint to resume from has behind it; 0 for a fresh run.

    Raises ``CheckpointError`` where there is none to be read, ``ConfigError`` where ``run.resume=auto`` would go on with
    another experiment than the folder holds, ``RunComplete`` where nothing is left to train.
    """
    folder, own = checkpoint_folder(cfg, run_dir), run_dir / "checkpoints"
    if not (folder / LATEST).exists():
        if cfg.run.resume not in ("auto", "never"):
            raise CheckpointError(
                f"run.resume={cfg.run.resume!r}: no {LATEST} in {folder}; give the folder that holds the iter_* folders"
            )
        return 0
    if folder.resolve() != own and (own / LATEST).exists():
        raise ConfigError(
            f"run.resume={cfg.run.resume!r}, but run.dir={cfg.run.dir!r} has checkpoints of its own (iteration "
            f"{latest_iteration(own)}): run.resume=auto goes on with those; to start from the others choose another run.dir"
        )
    if cfg.run.resume == "never":
        raise CheckpointError(
            f"run.resume=never, but run.dir={cfg.run.dir!r} holds checkpoints: choose another run.dir, or run.resume=auto"
        )
    if cfg.run.resume == "auto":
        _check_same_experiment(cfg, run_dir)
    done = latest_iteration(folder)
    check_content(cfg, iteration_folder(folder, done))
    if isinstance(cfg.algo, PpoConfig):
        _check_critic(cfg, iteration_folder(folder / CRITIC, done))
    if cfg.run.replay_from is None:
        read_state(folder, done)
    exported = not cfg.run.save_hf or (run_dir / "hf").exists()
    if done >= cfg.loop.num_rollout and exported:
        raise RunComplete(
            f"run.dir={cfg.run.dir!r} is complete: {done} rollouts were trained, loop.num_rollout is {cfg.loop.num_rollout}; "
            "raise loop.num_rollout to train on, or choose another run.dir for a new run"
        )
    return done


def check_content(cfg: TrainConfig, source: Path) -> None:
    """Raise ``CheckpointError`` unless ``source`` is whole and of the model that the run trains."""
    manifest = read_manifest(source)
    check_saved_model(manifest, source, "model.hf_checkpoint", cfg.model.hf_checkpoint, cfg.parallel.tp)
    _check_optimizer(cfg, manifest, source)


def _check_critic(cfg: TrainConfig, source: Path) -> None:
    if not source.is_dir():
        raise CheckpointError(
            f"{source}: missing, as of a run without a critic; resume a run with algo=ppo, or choose another run.dir"
        )
    manifest = read_manifest(source)
    check_critic(cfg, source, manifest)
    _check_optimizer(cfg, manifest, source)


def _check_optimizer(cfg: TrainConfig, manifest: Manifest, source: Path) -> None:
    mine = cfg.parallel.distributed_optimizer
    if manifest.distributed_optimizer != mine:
        raise CheckpointError(
            f"{source}: saved with parallel.distributed_optimizer={manifest.distributed_optimizer}, "
            f"which cannot be loaded with {mine}: set it as it was"
        )


def _check_same_experiment(cfg: TrainConfig, run_dir: Path) -> None:
    saved = run_dir / "config.yaml"
    if not saved.exists():
        return
    before, now = flatten(asdict(from_yaml(saved.read_text()))), flatten(asdict(cfg))
    changed = [key for key in sorted(before | now) if before.get(key) != now.get(key) and not _free(key)]
    if changed:
        shown = ", ".join(f"{key} {before.get(key)!r} -> {now.get(key)!r}" for key in changed[:SHOWN])
        more = f" and {len(changed) - SHOWN} more" if len(changed) > SHOWN else ""
        raise ConfigError(
            f"run.dir={cfg.run.dir!r} holds a run with other settings ({shown}{more}): choose another run.dir for a new run, "
            f"or run.resume={run_dir / 'checkpoints'} to go on with the new settings"
        )


def _free(key: str) -> bool:
    return key in FREE_KEYS or (key.split(".")[0] in FREE_GROUPS and key not in FIXED_KEYS)


def flatten(tree: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested settings by dotted key. Example: ``{"a": {"b": 1}}`` gives ``{"a.b": 1}``."""
    found: dict[str, Any] = {}
    for name, value in tree.items():
        found |= flatten(value, f"{prefix}{name}.") if isinstance(value, dict) and value else {f"{prefix}{name}": value}
    return found
