"""Rules for rollout.num_managers: every manager has an equal share of engines and prompts."""

from __future__ import annotations

from slime_like.config.schema.rollout import RolloutConfig
from slime_like.errors import ConfigError


def check_managers(cfg: RolloutConfig) -> None:
    """Raise ``ConfigError`` unless rollout.num_managers divides the number of engines and of prompts in a rollout.

    rollout.over_sampling_batch_size, if set, must be a multiple of rollout.num_managers too.
    """
    num_managers = cfg.num_managers
    if num_managers == 1:
        return
    parts = {"num_engines": cfg.num_engines, "batch_size": cfg.batch_size}
    if cfg.over_sampling_batch_size is not None:
        parts["over_sampling_batch_size"] = cfg.over_sampling_batch_size
    for name, number in parts.items():
        if number % num_managers:
            divisors = [n for n in range(num_managers, 0, -1) if not any(value % n for value in parts.values())]
            raise ConfigError(
                f"rollout.{name}={number} is not a multiple of rollout.num_managers={num_managers}, and every manager has "
                f"an equal share: set rollout.{name}={-(-number // num_managers) * num_managers}, or rollout.num_managers={divisors[0]}"
            )


def engines_setting(cfg: RolloutConfig, max_engines: int) -> str:
    """Return overrides that set the largest number of engines, up to ``max_engines``, that the managers can share equally.

    If ``max_engines`` is less than the number of managers, the overrides set ``max_engines`` and a single manager.
    """
    if max_engines < cfg.num_managers:
        return f"rollout.num_engines={max_engines} rollout.num_managers=1"
    return f"rollout.num_engines={max_engines // cfg.num_managers * cfg.num_managers}"
