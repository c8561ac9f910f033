"""Paths of a config: ``~`` is expanded, empty paths are refused."""

from __future__ import annotations

from pathlib import Path

from slime_like.config.schema.root import TrainConfig
from slime_like.errors import ConfigError

PATHS = (
    "critic.hf_checkpoint",
    "critic.load",
    "data.train",
    "model.hf_checkpoint",
    "model.megatron_checkpoint",
    "model.ref_checkpoint",
    "run.dir",
    "run.replay_from",
    "run.resume",
    "teacher.hf_checkpoint",
)


def settle_paths(cfg: TrainConfig) -> None:
    """Replace ``~`` by the home folder in every path of an unsealed config.

    Raises ``ConfigError`` naming the key if a path is empty or names an unknown user.
    """
    for key in PATHS:
        group, _, name = key.partition(".")
        value: str | None = getattr(getattr(cfg, group), name)
        if value is not None:
            setattr(getattr(cfg, group), name, _settled(key, value))
    datasets = cfg.evaluation.datasets
    cfg.evaluation.datasets = {name: _settled(f"evaluation.datasets.{name}", path) for name, path in datasets.items()}


def _settled(key: str, value: str) -> str:
    if not value.strip():
        raise ConfigError(f"{key} is empty: give a path")
    if not value.startswith("~"):
        return value
    try:
        return str(Path(value).expanduser())
    except RuntimeError as error:
        raise ConfigError(f"{key}={value!r}: {error} Write the path in full") from error
