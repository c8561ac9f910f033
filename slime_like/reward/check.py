"""Rewards checked at load, in the driver: a wrong name or a function of another shape never starts a process."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import cast

from slime_like import registry
from slime_like.config.names import REWARDS
from slime_like.config.rollout import RewardConfig
from slime_like.errors import ConfigError
from slime_like.interfaces import RewardFn

COMPARING = frozenset({"math", "exact"})  # rewards that cannot score a row without a label


def check_reward(config: RewardConfig) -> RewardFn:
    """The run's default reward. Raises ``ConfigError`` when it does not exist or is no ``RewardFn``."""
    return load_reward("reward.name", config.name)


def load_reward(key: str, name: str) -> RewardFn:
    """A reward by its name in table REWARDS or its dotted path."""
    registry.check(key, name, REWARDS, dotted=True)
    function = registry.resolve(key, name, REWARDS)
    if not callable(function):
        raise ConfigError(
            f"{key}={name!r} is a {type(function).__name__}; it must be a function (prompt, sample) -> float or Reward"
        )
    if inspect.iscoroutinefunction(function):
        raise ConfigError(
            f"{key}={name!r} is a coroutine function; rewards run in processes of their own: make it a plain function"
        )
    try:
        inspect.signature(function).bind(None, None)
    except TypeError as error:
        raise ConfigError(f"{key}={name!r} cannot be called as reward(prompt, sample): {error}") from error
    except ValueError:  # a builtin without a signature
        pass
    return cast(RewardFn, function)


def label_rule(config: RewardConfig) -> Callable[[str | None], bool]:
    """Whether a row needs a label, by its rm_type (None: the run's reward). What ``SourceContext.needs_label`` asks.

    The function raises ``ConfigError`` on an unknown rm_type. A dotted path in a row is refused unless it is the run's
    own reward: a data file must not choose which code runs.
    """

    def needs_label(rm_type: str | None) -> bool:
        name = config.name if rm_type is None else rm_type
        if name != config.name:
            registry.check("rm_type", name, REWARDS)
        return name in COMPARING

    return needs_label
