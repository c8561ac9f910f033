"""Loading and validation of rewards.

The driver imports the rewards of the configuration to check their signatures before it starts processes; the worker processes
import the rewards that they call.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from functools import cache
from typing import Any, cast

from slime_like import registry
from slime_like.config.schema.names import REWARDS
from slime_like.config.schema.reward_names import REMOTE, ROW, check_reward_name, split_prefix
from slime_like.config.schema.rollout import RewardConfig
from slime_like.errors import ConfigError
from slime_like.interfaces import GroupRewardFn, RewardFn
from slime_like.reward.kinds import RowCheck, compares, row_check, takes_groups
from slime_like.util.user_code import check_signature, location

AnyReward = RewardFn | GroupRewardFn
RowRule = Callable[[str | None, str | None, Mapping[str, Any]], str]
"""Function of (rm_type, label, metadata) that returns why the rewards cannot score the row; empty if they can."""


def check_reward(config: RewardConfig) -> None:
    """Raise ``ConfigError`` if a reward in the config does not exist or is not a reward function."""
    load_reward("reward.name", config.name)
    for name in config.weights:
        if name != ROW:
            load_reward("reward.weights", name)


def load_reward(key: str, name: str) -> AnyReward:
    """Return a reward by its name, ignoring the prefix ``boxed_``, or by its import path.

    Raises ``ConfigError`` if it does not exist or cannot be called as a reward.
    """
    check_reward_name(key, name, dotted=True)
    base = split_prefix(name)[1]
    function = registry.resolve(key, base, REWARDS)
    if base == REMOTE:
        return function
    takes = "samples" if takes_groups(function) else "sample"
    if not callable(function):
        raise ConfigError(
            f"{key}={name!r} is a {type(function).__name__}; it must be a function (prompt, sample) -> float or Reward"
        )
    if inspect.iscoroutinefunction(function):
        raise ConfigError(
            f"{key}={name!r} is a coroutine function; rewards run in separate processes: define it with def, not async def"
            f"{location(function)}"
        )
    check_signature(key, name, function, f"reward(prompt, {takes})", 2)
    return cast(AnyReward, function)


def label_rule(config: RewardConfig) -> Callable[[str | None], bool]:
    """Return ``SourceContext.needs_label``: a function that returns whether rows with a given rm_type need a label.

    For rows without an rm_type, pass None. An rm_type that ``RewardConfig.components`` does not use is ignored. The function
    raises ``ConfigError`` if the rm_type is unknown or an import path that the config does not contain (a data file must not
    choose the code that runs), or if a reward cannot be loaded or lacks the ``reward.remote_url`` it needs.
    """

    @cache
    def needs_label(rm_type: str | None) -> bool:
        return any(compares(function) for function in _functions(config, rm_type))

    return needs_label


def row_rule(config: RewardConfig) -> RowRule:
    """Return ``SourceContext.row_problem``: a function that returns the reason why a reward rejects a row.

    It runs the checks attached by ``checks_rows`` and returns the first reason, or an empty string if all accept the row.
    Missing labels are left to ``label_rule``. The function raises ``ConfigError`` in the cases listed in ``label_rule``.
    """

    @cache
    def checks(rm_type: str | None) -> list[RowCheck]:
        return [check for function in _functions(config, rm_type) if (check := row_check(function)) is not None]

    def problem(rm_type: str | None, label: str | None, metadata: Mapping[str, Any]) -> str:
        return next(filter(None, (check(label, metadata) for check in checks(rm_type))), "")

    return problem


def _functions(config: RewardConfig, rm_type: str | None) -> list[AnyReward]:
    """Return the reward functions of rows with this rm_type. Raises ``ConfigError`` if one is unknown or cannot be used."""
    functions: list[AnyReward] = []
    for name in config.components(rm_type):
        key = "reward.name" if name == config.name else "reward.weights" if name in config.weights else "rm_type"
        if key == "rm_type":  # the name comes from a data file, which must not choose the code that runs
            check_reward_name(key, name)
        if split_prefix(name)[1] == REMOTE and config.remote_url is None:
            raise ConfigError(f"{key}={name!r} needs a reward server: set reward.remote_url to its address")
        functions.append(load_reward(key, name))
    return functions
