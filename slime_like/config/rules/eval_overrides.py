"""Rules for ``evaluation.overrides``, which overrides settings of ``evaluation`` for individual datasets."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from slime_like.config.rules.no_token import OFF, refuse_no_token
from slime_like.config.schema.reward_names import ROW, check_reward_name
from slime_like.config.schema.rollout import EvalConfig, RewardConfig
from slime_like.errors import ConfigError
from slime_like.registry import nearest

WORDS = {int: "a whole number", float: "a number", str: "a string", bool: "true or false"}
SETTINGS: dict[str, type] = {
    "n_samples_per_prompt": int,
    "temperature": float,
    "top_p": float,
    "top_k": int,
    "max_response_len": int,
    "rm_type": str,
    "input_key": str,
    "label_key": str,
    "metadata_key": str,
    "apply_chat_template": bool,
}
RANGES = {
    "n_samples_per_prompt": (1, math.inf),
    "temperature": (0.0, 10.0),
    "top_p": (0.0, 1.0),
    "top_k": (-1, math.inf),
    "max_response_len": (1, math.inf),
}


def check_overrides(config: EvalConfig, reward: RewardConfig) -> None:
    """Raise ``ConfigError`` on an override with an unknown dataset or setting, or a value that is invalid or has no effect."""
    for name, settings in config.overrides.items():
        key = f"evaluation.overrides.{name}"
        if name not in config.datasets:
            hint = nearest(name, config.datasets) if config.datasets else "evaluation.datasets names none"
            raise ConfigError(f"{key}: there is no such dataset: {hint}")
        if not isinstance(settings, Mapping):
            raise ConfigError(f"{key}={settings!r} must be a mapping such as {{n_samples_per_prompt: 16}}")
        for setting in settings:  # pyright: ignore[reportUnknownVariableType]
            _check(f"{key}.{setting}", str(setting), settings[setting])  # pyright: ignore[reportUnknownArgumentType]
        if "rm_type" in settings:
            _check_reward(f"{key}.rm_type", settings["rm_type"], reward)


def override_lengths(config: EvalConfig) -> list[tuple[str, int | None]]:
    """Return the key and value of every override of ``max_response_len``."""
    name = "max_response_len"
    return [
        (f"evaluation.overrides.{s}.{name}", overrides[name])
        for s, overrides in config.overrides.items()
        if name in overrides
    ]


def _check(key: str, setting: str, value: Any) -> None:
    kind = SETTINGS.get(setting)
    if kind is None:
        raise ConfigError(f"{key} is unknown: {nearest(setting, SETTINGS)}")
    fits = isinstance(value, (int, float) if kind is float else kind) and isinstance(value, bool) == (kind is bool)
    if not fits or value == "":
        raise ConfigError(f"{key}={value!r} must be {WORDS[kind]}")
    low, high = RANGES.get(setting, (-math.inf, math.inf))
    if setting in RANGES and not low <= value <= high:
        raise ConfigError(f"{key}={value!r} must lie in [{low:g}, {high:g}]")
    if setting in OFF:
        refuse_no_token(key, setting, value)


def _check_reward(key: str, name: str, reward: RewardConfig) -> None:
    check_reward_name(key, name)
    if ":" in reward.name or (reward.weights and ROW not in reward.weights):
        by = f"reward.name={reward.name!r}" if ":" in reward.name else f"reward.weights without {ROW}"
        raise ConfigError(
            f"{key}={name!r} has no effect with {by}, which scores every row: set a reward name from table REWARDS there, or "
            "remove the override"
        )
