"""Rules for over-sampling and partial rollouts across config groups; ``RolloutConfig.check`` has those within ``rollout.*``."""

from __future__ import annotations

from slime_like.config.schema.policy import PolicyConfig
from slime_like.config.schema.root import TrainConfig
from slime_like.errors import ConfigError


def check_over_sampling(cfg: TrainConfig) -> None:
    """Raise ``ConfigError`` if over-sampling or partial rollouts contradict other keys.

    ``algo.mask_offpolicy`` is rejected if it has no effect.
    """
    num_started, max_partial_staleness = cfg.rollout.over_sampling_batch_size, cfg.rollout.max_partial_staleness
    if num_started is not None and cfg.run.deterministic:
        raise ConfigError(
            f"rollout.over_sampling_batch_size={num_started} with run.deterministic=true: the groups that finish first are trained "
            f"on, which depends on timing; set rollout.over_sampling_batch_size=null (and "
            "rollout.partial_rollout=false), or run.deterministic=false"
        )
    masks = isinstance(cfg.algo, PolicyConfig) and cfg.algo.mask_offpolicy
    if masks and not cfg.rollout.partial_rollout and not cfg.loop.max_staleness and cfg.run.replay_from is None:
        raise ConfigError(
            "algo.mask_offpolicy=true has no effect without rollout.partial_rollout=true or loop.max_staleness, because each "
            "sample then comes from a single weight version: set rollout.partial_rollout=true or loop.max_staleness above 0, or "
            "remove algo.mask_offpolicy"
        )
    if max_partial_staleness is not None and max_partial_staleness <= cfg.loop.max_staleness:
        raise ConfigError(
            f"rollout.max_partial_staleness={max_partial_staleness} must be above loop.max_staleness={cfg.loop.max_staleness}, "
            "because groups that are never aborted may already lag that far: set rollout.max_partial_staleness to at least "
            f"{cfg.loop.max_staleness + 1}"
        )
