"""Selection of the groups of a rollout, and penalty for long responses, from a run's config."""

from __future__ import annotations

from slime_like.config.schema import names
from slime_like.config.schema.role_algo import DistillConfig, PpoConfig
from slime_like.config.schema.root import TrainConfig
from slime_like.data.overlong import OverlongPenalty
from slime_like.registry import is_user_code
from slime_like.rollout.collect.over_sampling import max_group_staleness
from slime_like.rollout.selection import GroupSelection, LearningSignal, SelectionSpec


def open_selection(cfg: TrainConfig, samples_per_rollout: int) -> GroupSelection:
    """Return the selector of the groups that each rollout trains on, built from the config."""
    spec = SelectionSpec(
        samples_per_rollout=samples_per_rollout,
        leftover=cfg.loop.leftover,
        max_staleness=max_group_staleness(cfg.rollout, cfg.loop),
        shuffle=cfg.reward.shuffle,
        seed=cfg.run.seed,
    )
    return GroupSelection(spec, LearningSignal(_baseline(cfg), overlong_penalty(cfg)))


def overlong_penalty(cfg: TrainConfig) -> OverlongPenalty | None:
    """Return the penalty subtracted from rewards before advantages are computed; None if there is none."""
    reward, max_len = cfg.reward, cfg.rollout.max_response_len
    if reward.overlong_buffer_len is None:
        return None
    return OverlongPenalty(max_len, reward.overlong_buffer_len, reward.overlong_penalty_factor)


def _baseline(cfg: TrainConfig) -> str:
    """Return the scope in which equal rewards make every advantage 0: "group", "batch", or "none"."""
    parts = (
        (cfg.algo.group_advantage, names.GROUP_ADVANTAGES),
        (cfg.algo.token_advantage, names.TOKEN_ADVANTAGES),
        (cfg.algo.loss, names.LOSSES),
    )
    if any(is_user_code(name, table) for name, table in parts):
        return "none"  # custom functions may use equal rewards
    if cfg.algo.group_advantage is not None:
        return "group"
    # A critic learns from equal rewards too, and its values differ from them at first.
    return "none" if isinstance(cfg.algo, (DistillConfig, PpoConfig)) else "batch"
