"""Reward names: registered in ``REWARDS`` (optionally with the prefix ``boxed_``), or import paths."""

from __future__ import annotations

from slime_like.config.schema.names import REWARDS
from slime_like.registry import check

PREFIX = "boxed_"  # a reward with this prefix scores only the content of the response's last \boxed{}
REMOTE = "remote_rm"  # the reward that posts to reward.remote_url
ROW = "rm_type"  # key of reward.weights for the row's reward, or for reward.name if the row has none


def split_prefix(name: str) -> tuple[bool, str]:
    """Return whether ``name`` has the prefix boxed_, and ``name`` without it: ``(True, "f1")`` for ``boxed_f1``.

    An import path has no prefix, even if it begins with boxed_.
    """
    boxed = name.startswith(PREFIX) and ":" not in name  # a path may begin with the prefix
    return boxed, name.removeprefix(PREFIX) if boxed else name


def check_reward_name(key: str, name: str, *, dotted: bool = False) -> None:
    """Raise ``ConfigError`` unless ``name`` is a known reward or, with ``dotted``, an import path."""
    boxed, base = split_prefix(name)
    if boxed and base not in REWARDS:
        check(key, name, {f"{PREFIX}{reward}": target for reward, target in REWARDS.items()})
    elif not boxed:
        check(key, name, REWARDS, dotted=dotted)
