"""Select and check the checkpoint to resume from (``run.resume``), before any process starts."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

from slime_like.checkpoint.files import CRITIC, LATEST, iteration_folder, iterations, new_run_hint, resumable_iteration
from slime_like.checkpoint.record import CheckpointRecord, Manifest, read_record
from slime_like.cluster.plan.verify import verify
from slime_like.cluster.run.rollout_state import check_state
from slime_like.cluster.start.identity import DATA, MODEL, changed_inputs, flatten, run_record
from slime_like.config.load.loader import read_config, saved_settings
from slime_like.config.rules.roles import check_critic
from slime_like.config.rules.saved_model import check_saved_model
from slime_like.config.schema.remote_experts import RemoteOptions
from slime_like.config.schema.role_algo import PpoConfig
from slime_like.config.schema.root import TrainConfig
from slime_like.errors import CheckpointError, ConfigError, RunComplete
from slime_like.printable import visible
from slime_like.util.counted import counted

# Keys that may change on resume: those of FREE_GROUPS without FIXED_KEYS and CHECKED_KEYS, and FREE_KEYS.
FREE_GROUPS = ("run", "metrics", "evaluation", "placement", "parallel", "weights", "guard", "health", "chaos")
FIXED_KEYS = ("run.seed", "run.deterministic")
CHECKED_KEYS = ("parallel.distributed_optimizer", "rollout.num_managers")
"""Keys whose changes are refused by their own checks, because ``run.resume=PATH`` could not continue after a change either."""
REMOTE_EXPERTS = tuple(item.name for item in fields(RemoteOptions))
FREE_KEYS = (
    "loop.num_rollout",
    "loop.num_epoch",
    "loop.step_deadline_s",
    "rollout.num_engines",
    "rollout.tp",
    "rollout.engine_num_nodes",
    "rollout.dp_attention",
    "rollout.flow_mla.enabled",
    "rollout.flow_mla.weights",
    "rollout.flow_mla.prefetch_distance",
    "rollout.flow_mla.transport",
    "rollout.flow_mla.max_ctas",
    *(f"rollout.remote_experts.{name}" for name in REMOTE_EXPERTS),
    "rollout.dcp",
    "rollout.dcp_comm",
    "rollout.dcp_replicate_q",
    "rollout.symmetric_memory",
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
ORDER_KEYS = ("run.seed", "data.shuffle")
"""Keys that determine the order of prompts."""
PROMPT_KEYS = ("data.", MODEL, "rollout.max_context_len")
"""Beginnings of the names of settings and files that may change token ids or labels of prompts."""
MAX_NAMES = 4


def checkpoint_folder(cfg: TrainConfig, run_dir: Path) -> Path:
    """Return the folder of checkpoints that ``run.resume`` names, or that of ``run_dir`` if it is "auto" or "never"."""
    return run_dir / "checkpoints" if cfg.run.resume in ("auto", "never") else Path(cfg.run.resume)


def first_rollout(cfg: TrainConfig, run_dir: Path, run: Mapping[str, Any] | None = None) -> int:
    """Return the number of trained rollouts in the checkpoint to resume from; 0 for a fresh run.

    ``run`` is the ``run_record`` of ``cfg``, computed if None. Raises ``CheckpointError`` if the checkpoint is missing,
    its files are damaged or were changed, its model or optimizer layout is not that of the run, or ``run.resume=never``
    finds checkpoints in run.dir. Raises ``ConfigError`` if ``run.resume=auto`` would continue a different experiment, or
    if ``run.resume`` names other checkpoints although run.dir has its own. Raises ``RunComplete`` if all rollouts are
    trained and, with ``run.save_hf``, exported.
    """
    folder, run_checkpoints = checkpoint_folder(cfg, run_dir), run_dir / "checkpoints"
    if cfg.run.resume == "never" and (iterations(run_checkpoints) or resumable_iteration(run_checkpoints) is not None):
        raise CheckpointError(
            f"run.resume=never, but run.dir={cfg.run.dir!r} has checkpoints: choose another run.dir, or set run.resume=auto"
        )
    num_trained = resumable_iteration(folder)
    if num_trained is None:
        if cfg.run.resume not in ("auto", "never"):
            raise CheckpointError(
                f"run.resume={cfg.run.resume!r}: {folder} has no {LATEST} that names an iteration; set run.resume to the folder that contains "
                "the iter_* folders"
            )
        return 0
    if folder.resolve() != run_checkpoints and (latest := resumable_iteration(run_checkpoints)) is not None:
        raise ConfigError(
            f"run.resume={cfg.run.resume!r}, but run.dir={cfg.run.dir!r} has checkpoints of its own (iteration "
            f"{latest}): run.resume=auto continues with those; to start from the other checkpoints, choose another run.dir"
        )
    source = iteration_folder(folder, num_trained)
    records = {source: check_saved(cfg, source)}
    _check_same_run(cfg, run_dir, source, records[source], run or run_record(cfg))
    if isinstance(cfg.algo, PpoConfig):
        critic = iteration_folder(folder / CRITIC, num_trained)
        records[critic] = _check_critic(cfg, critic)
    is_exported = not cfg.run.save_hf or (run_dir / "hf").exists()
    if num_trained >= cfg.loop.num_rollout and is_exported:
        raise RunComplete(
            f"run.dir={cfg.run.dir!r} is complete: {counted(num_trained, 'rollout')} trained, loop.num_rollout is "
            f"{cfg.loop.num_rollout}; "
            "raise loop.num_rollout to continue training, or choose another run.dir for a new run"
        )
    for path, record in records.items():
        verify(cfg, path, record)
    if cfg.run.replay_from is None:
        check_state(folder, num_trained)
    return num_trained


def check_saved(cfg: TrainConfig, source: Path) -> CheckpointRecord:
    """Return the record of the checkpoint ``source``.

    Raises the errors of ``read_record``, which compares only the sizes of files, and ``CheckpointError`` if the model or
    optimizer layout is not that of the run.
    """
    record = read_record(source)
    manifest = record.manifest
    check_saved_model(manifest, source, "model.hf_checkpoint", cfg.model.hf_checkpoint, cfg.parallel.tp)
    _check_optimizer(cfg, manifest, source)
    return record


def _check_critic(cfg: TrainConfig, source: Path) -> CheckpointRecord:
    if not source.is_dir():
        raise CheckpointError(
            f"{source}: missing, because the run had no critic; resume a run with algo=ppo, or choose another run.dir"
        )
    record = read_record(source)
    check_critic(cfg, source, record.manifest)
    _check_optimizer(cfg, record.manifest, source)
    return record


def _check_optimizer(cfg: TrainConfig, manifest: Manifest, source: Path) -> None:
    distributed = cfg.parallel.distributed_optimizer
    if manifest.distributed_optimizer != distributed:
        raise CheckpointError(
            f"{source}: saved with parallel.distributed_optimizer={manifest.distributed_optimizer}, "
            f"which cannot be loaded with {distributed}: restore the saved value"
        )


def _check_same_run(
    cfg: TrainConfig, run_dir: Path, source: Path, record: CheckpointRecord, run: Mapping[str, Any]
) -> None:
    """Raise ``ConfigError`` if ``run.resume=auto`` and a setting that may not change, or an input, has changed.

    If ``run.resume`` is the path of checkpoints, a new run may have new settings, and a changed tokenizer or
    config.json only causes a warning.
    """
    auto = cfg.run.resume == "auto"
    saved_config = record.run["config"] if record.run is not None else _settings_of(run_dir / "config.yaml")
    if auto and saved_config is not None:
        _check_same_settings(cfg, run_dir, saved_config)
    changed_names = changed_inputs(record.run, run) if record.run is not None else []
    if auto and changed_names:
        raise ConfigError(
            f"run.dir={cfg.run.dir!r}: {_join_names(changed_names)} changed since {source.name} was written: restore the old version, "
            f"or {_alternatives(run_dir / 'checkpoints', changed_names, 'current files')}"
        )
    if changed_keys := [name for name in changed_names if name != DATA]:
        sys.stderr.write(
            visible(
                f"warning: run.resume={cfg.run.resume!r}: {_join_names(changed_keys)} differs from the files with which the checkpoint was trained\n"
            )
        )


def _check_same_settings(cfg: TrainConfig, run_dir: Path, saved: Mapping[str, Any]) -> None:
    old, new = flatten(saved_settings(saved)), flatten(asdict(cfg))
    if changed_keys := [key for key in sorted(old | new) if old.get(key) != new.get(key) and _is_fixed(key)]:
        raise ConfigError(
            f"run.dir={cfg.run.dir!r} holds a run with other settings "
            f"({_join_names([f'{key} {old.get(key)!r} -> {new.get(key)!r}' for key in changed_keys])}): "
            f"{_alternatives(run_dir / 'checkpoints', changed_keys, 'new settings')}"
        )


def _alternatives(checkpoints: Path, changed_names: Sequence[str], present_state: str) -> str:
    """Return the last part of an error message: alternatives to restoring the settings or files in ``changed_names``.

    The text suggests a new run or ``run.resume=PATH``, which continues with the ``present_state`` ("new settings" or
    "current files"). It does not suggest ``run.resume`` if a key of ``ORDER_KEYS`` has changed, because ``check_cursor``
    refuses to continue if the prompts or their order differ.
    """
    hint = new_run_hint(checkpoints)
    if not {*changed_names}.isdisjoint(ORDER_KEYS):
        return hint
    prompts_may_differ = any(name.startswith(PROMPT_KEYS) for name in changed_names)
    condition = ", which is refused if they give other prompts or labels" * prompts_may_differ
    return f"{hint}, or set run.resume={checkpoints} to continue with the {present_state}{condition}"


def _settings_of(path: Path) -> dict[str, Any] | None:
    return asdict(read_config(path)) if path.exists() else None


def _join_names(names: Sequence[str]) -> str:
    suffix = f" and {len(names) - MAX_NAMES} more" if len(names) > MAX_NAMES else ""
    return ", ".join(names[:MAX_NAMES]) + suffix


def _is_fixed(key: str) -> bool:
    """Return True if ``_check_same_settings`` refuses a change of ``key``."""
    is_in_free_group = key.split(".")[0] in FREE_GROUPS and key not in FIXED_KEYS
    return not is_in_free_group and key not in (*FREE_KEYS, *CHECKED_KEYS)
