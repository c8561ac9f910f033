"""Where a run starts: afresh, or from the checkpoint that ``run.resume`` names. Decided before any process starts."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from slime_like.checkpoint.files import CRITIC, LATEST, iteration_folder, iterations, resumable_iteration
from slime_like.checkpoint.record import CheckpointRecord, Manifest, read_record
from slime_like.cluster.plan.verify import verify
from slime_like.cluster.run.rollouts import read_state
from slime_like.cluster.start.identity import DATA, changed_inputs, flatten, run_record
from slime_like.config.load.loader import read_config, saved_settings
from slime_like.config.rules.roles import check_critic
from slime_like.config.rules.saved_model import check_saved_model
from slime_like.config.schema.role_algo import PpoConfig
from slime_like.config.schema.root import TrainConfig
from slime_like.errors import CheckpointError, ConfigError, RunComplete
from slime_like.printable import visible

# What may change between the parts of one run without making it another experiment.
FREE_GROUPS = ("run", "metrics", "evaluation", "placement", "parallel", "weights", "guard", "health", "chaos")
FIXED_KEYS = ("run.seed", "run.deterministic")
FREE_KEYS = (
    "loop.num_rollout",
    "loop.num_epoch",
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


def first_rollout(cfg: TrainConfig, run_dir: Path, run: Mapping[str, Any] | None = None) -> int:
    """Return how many rollouts the checkpoint to resume from has behind it; 0 for a fresh run.

    ``run`` is the ``run_record`` of ``cfg``, made here where it is None and needed. Raises ``CheckpointError`` where there is
    no checkpoint to be read or its files are not as they were written, ``ConfigError`` where ``run.resume=auto`` would go on
    with another experiment than the folder holds, ``RunComplete`` where nothing is left to train.
    """
    folder, own = checkpoint_folder(cfg, run_dir), run_dir / "checkpoints"
    if cfg.run.resume == "never" and (iterations(own) or resumable_iteration(own) is not None):
        raise CheckpointError(
            f"run.resume=never, but run.dir={cfg.run.dir!r} holds checkpoints: choose another run.dir, or run.resume=auto"
        )
    done = resumable_iteration(folder)
    if done is None:
        if cfg.run.resume not in ("auto", "never"):
            raise CheckpointError(
                f"run.resume={cfg.run.resume!r}: no {LATEST} in {folder} that names an iteration; give the folder that holds "
                "the iter_* folders"
            )
        return 0
    if folder.resolve() != own and (mine := resumable_iteration(own)) is not None:
        raise ConfigError(
            f"run.resume={cfg.run.resume!r}, but run.dir={cfg.run.dir!r} has checkpoints of its own (iteration "
            f"{mine}): run.resume=auto goes on with those; to start from the others choose another run.dir"
        )
    source = iteration_folder(folder, done)
    records = {source: check_saved(cfg, source)}
    _check_same_run(cfg, run_dir, source, records[source], run or run_record(cfg))
    if isinstance(cfg.algo, PpoConfig):
        critic = iteration_folder(folder / CRITIC, done)
        records[critic] = _check_critic(cfg, critic)
    exported = not cfg.run.save_hf or (run_dir / "hf").exists()
    if done >= cfg.loop.num_rollout and exported:
        raise RunComplete(
            f"run.dir={cfg.run.dir!r} is complete: {done} rollouts were trained, loop.num_rollout is {cfg.loop.num_rollout}; "
            "raise loop.num_rollout to train on, or choose another run.dir for a new run"
        )
    for path, record in records.items():
        verify(cfg, path, record)
    if cfg.run.replay_from is None:
        read_state(folder, done)
    return done


def check_saved(cfg: TrainConfig, source: Path) -> CheckpointRecord:
    """Return the description of ``source``. Raises ``CheckpointError`` unless it is of the model that the run trains."""
    record = read_record(source)
    manifest = record.manifest
    check_saved_model(manifest, source, "model.hf_checkpoint", cfg.model.hf_checkpoint, cfg.parallel.tp)
    _check_optimizer(cfg, manifest, source)
    return record


def _check_critic(cfg: TrainConfig, source: Path) -> CheckpointRecord:
    if not source.is_dir():
        raise CheckpointError(
            f"{source}: missing, as of a run without a critic; resume a run with algo=ppo, or choose another run.dir"
        )
    record = read_record(source)
    check_critic(cfg, source, record.manifest)
    _check_optimizer(cfg, record.manifest, source)
    return record


def _check_optimizer(cfg: TrainConfig, manifest: Manifest, source: Path) -> None:
    mine = cfg.parallel.distributed_optimizer
    if manifest.distributed_optimizer != mine:
        raise CheckpointError(
            f"{source}: saved with parallel.distributed_optimizer={manifest.distributed_optimizer}, "
            f"which cannot be loaded with {mine}: set it as it was"
        )


def _check_same_run(
    cfg: TrainConfig, run_dir: Path, source: Path, record: CheckpointRecord, run: Mapping[str, Any]
) -> None:
    """Check that settings and inputs are those of the checkpoint, or have changed where they may.

    ``run.resume=auto`` refuses other ones; a checkpoint's path is where a new run with new settings may start, which is
    warned of another tokenizer or config.json alone.
    """
    auto = cfg.run.resume == "auto"
    before = record.run["config"] if record.run is not None else _settings_of(run_dir / "config.yaml")
    if auto and before is not None:
        _check_same_settings(cfg, run_dir, before)
    changed = changed_inputs(record.run, run) if record.run is not None else []
    if auto and changed:
        raise ConfigError(
            f"run.dir={cfg.run.dir!r}: {_listed(changed)} changed since {source.name} was written: restore it, "
            f"choose another run.dir for a new run, or run.resume={run_dir / 'checkpoints'} to go on with what is there now"
        )
    if odd := [name for name in changed if name != DATA]:
        sys.stderr.write(
            visible(
                f"warning: run.resume={cfg.run.resume!r}: {_listed(odd)} is not what the checkpoint was trained with\n"
            )
        )


def _check_same_settings(cfg: TrainConfig, run_dir: Path, saved: Mapping[str, Any]) -> None:
    before, now = flatten(saved_settings(saved)), flatten(asdict(cfg))
    changed = [key for key in sorted(before | now) if before.get(key) != now.get(key) and not _free(key)]
    if changed:
        raise ConfigError(
            f"run.dir={cfg.run.dir!r} holds a run with other settings "
            f"({_listed([f'{key} {before.get(key)!r} -> {now.get(key)!r}' for key in changed])}): choose another run.dir for a "
            f"new run, or run.resume={run_dir / 'checkpoints'} to go on with the new settings"
        )


def _settings_of(path: Path) -> dict[str, Any] | None:
    return asdict(read_config(path)) if path.exists() else None


def _listed(names: Sequence[str]) -> str:
    more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
    return ", ".join(names[:SHOWN]) + more


def _free(key: str) -> bool:
    return key in FREE_KEYS or (key.split(".")[0] in FREE_GROUPS and key not in FIXED_KEYS)
