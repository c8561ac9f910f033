"""Reward names, which are entries of table REWARDS (optionally with the prefix ``boxed_``) or paths."""

from __future__ import annotations

from slime_like.config.schema.names import REWARDS
from slime_like.registry import check

PREFIX = "boxed_"  # the reward scores only the content of the response's last box
REMOTE = "remote_rm"  # posts to reward.remote_url
ROW = "rm_type"  # in reward.weights, stands for the row's reward, or else reward.name


def split_prefix(name: str) -> tuple[bool, str]:
    """Return (has the prefix, name without it). Example: ``boxed_f1`` gives ``(True, "f1")``."""
    boxed = name.startswith(PREFIX) and ":" not in name  # a path may begin with the prefix
    return boxed, name.removeprefix(PREFIX) if boxed else name


def check_reward_name(key: str, name: str, *, dotted: bool = False) -> None:
    """Raise ``ConfigError`` unless ``name`` is a known reward or, with ``dotted``, a path."""
    boxed, base = split_prefix(name)
    if boxed and base not in REWARDS:
        check(key, name, {f"{PREFIX}{reward}": target for reward, target in REWARDS.items()})
    elif not boxed:
        check(key, name, REWARDS, dotted=dotted)
