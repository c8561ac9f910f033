"""Resolution of paths in a config: expand ``~``, refuse empty paths and make paths of user code absolute."""

from __future__ import annotations

from operator import attrgetter
from pathlib import Path

from slime_like.config.schema.root import TrainConfig
from slime_like.errors import ConfigError
from slime_like.util.user_module import absolute

PATHS = (
    "critic.hf_checkpoint",
    "critic.load",
    "data.train",
    "model.hf_checkpoint",
    "model.megatron_checkpoint",
    "model.ref_checkpoint",
    "rollout.remote_experts.key_file",
    "rollout.remote_experts.load_file",
    "rollout.remote_experts.record_load",
    "run.dir",
    "run.replay_from",
    "run.resume",
    "teacher.hf_checkpoint",
)
USER_CODE = (
    "algo.group_advantage",
    "algo.loss",
    "algo.off_policy",
    "algo.token_advantage",
    "data.source",
    "reward.name",
    "rollout.agent",
    "rollout.generate",
    "run.prepare",
)


def resolve_paths(cfg: TrainConfig) -> None:
    """Expand ``~`` in the paths of an unsealed config, and make the path in ``file.py:name`` absolute if the file exists.

    Paths of user code become absolute because a run's processes may have different working directories. Raises ``ConfigError``
    naming the key if a path in ``PATHS`` or ``evaluation.datasets`` is empty or names an unknown user, or if two keys of
    ``reward.weights`` name the same reward.
    """
    for key in PATHS:
        group, _, name = key.rpartition(".")
        owner = attrgetter(group)(cfg)
        value: str | None = getattr(owner, name)
        if value is not None:
            setattr(owner, name, _expand_path(key, value))
    for key in USER_CODE:
        group, _, name = key.partition(".")
        value = getattr(getattr(cfg, group), name, None)  # an algorithm has some of the keys
        if value is not None:
            setattr(getattr(cfg, group), name, absolute(value))
    cfg.rollout.filters = [absolute(name) for name in cfg.rollout.filters]
    cfg.metrics.sinks = [absolute(name) for name in cfg.metrics.sinks]
    cfg.reward.weights = _absolute_weights(cfg.reward.weights)
    datasets = cfg.evaluation.datasets
    cfg.evaluation.datasets = {
        name: _expand_path(f"evaluation.datasets.{name}", path) for name, path in datasets.items()
    }


def _absolute_weights(weights: dict[str, float]) -> dict[str, float]:
    names: dict[str, str] = {}
    for name in weights:
        other_name = names.setdefault(absolute(name), name)
        if other_name != name:
            raise ConfigError(f"reward.weights has {other_name!r} and {name!r}, which name the same reward: remove one")
    return {path: weights[name] for path, name in names.items()}


def _expand_path(key: str, value: str) -> str:
    if not value.strip():
        raise ConfigError(f"{key} is empty: give a path")
    if not value.startswith("~"):
        return value
    try:
        return str(Path(value).expanduser())
    except RuntimeError as error:
        raise ConfigError(f"{key}={value!r}: {error} Write the path in full") from error
