"""The held-out sets of a run, each with its own settings: ``evaluation.overrides`` over what ``evaluation`` says of all."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, cast

from slime_like.config.reward_names import ROW, check_reward_name
from slime_like.config.rollout import EvalConfig, RewardConfig
from slime_like.errors import ConfigError
from slime_like.registry import nearest


@dataclass(frozen=True, slots=True)
class EvalSet:
    """One held-out set. None: as the run has it."""

    name: str
    path: str
    n_samples_per_prompt: int
    temperature: float
    top_p: float
    top_k: int
    max_response_len: int | None = None  # rollout.max_response_len
    rm_type: str | None = None  # reward of every row, in place of its own
    input_key: str | None = None  # of data.*, as what follows
    label_key: str | None = None
    metadata_key: str | None = None
    apply_chat_template: bool | None = None


WORDS = {int: "a whole number", float: "a number", str: "a word", bool: "true or false"}
KINDS: dict[str, type] = {
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


def eval_sets(config: EvalConfig) -> tuple[EvalSet, ...]:
    """Every set with its settings. Raises ``ConfigError`` on an override of no set, of no setting, or that does not fit."""
    for name in config.overrides:
        if name not in config.datasets:
            raise ConfigError(f"evaluation.overrides.{name}: there is no such set: {_sets(name, config)}")
    return tuple(_set(name, path, config) for name, path in config.datasets.items())


def eval_lengths(config: EvalConfig) -> list[tuple[str, int | None]]:
    """Each set's key and most tokens per response, as far as a set has its own."""
    sets = [found for found in eval_sets(config) if found.max_response_len != config.max_response_len]
    return [(f"evaluation.overrides.{found.name}.max_response_len", found.max_response_len) for found in sets]


def check_eval_sets(config: EvalConfig, reward: RewardConfig) -> None:
    """Raise ``ConfigError`` on settings of a set that cannot work."""
    for found in eval_sets(config):
        if found.rm_type is None:
            continue
        key = f"evaluation.overrides.{found.name}.rm_type"
        check_reward_name(key, found.rm_type)
        if ":" in reward.name or (reward.weights and ROW not in reward.weights):
            by = f"reward.name={reward.name!r}" if ":" in reward.name else f"reward.weights without {ROW}"
            raise ConfigError(
                f"{key}={found.rm_type!r} has no effect with {by}, which scores every row: name a reward of the table "
                f"there, or remove the override"
            )


def _set(name: str, path: str, config: EvalConfig) -> EvalSet:
    shared = EvalSet(
        name, path, config.n_samples_per_prompt, config.temperature, config.top_p, config.top_k, config.max_response_len
    )
    given = config.overrides.get(name) or {}
    key = f"evaluation.overrides.{name}"
    if not isinstance(given, Mapping):
        raise ConfigError(f"{key}={given!r} must be a mapping such as {{n_samples_per_prompt: 16}}")
    settings = cast("Mapping[str, Any]", given)
    return replace(shared, **{setting: _value(f"{key}.{setting}", setting, settings[setting]) for setting in settings})


def _value(key: str, setting: str, value: Any) -> Any:
    kind = KINDS.get(setting)
    if kind is None:
        raise ConfigError(f"{key} is unknown: {nearest(setting, KINDS)}")
    fits = isinstance(value, (int, float) if kind is float else kind) and isinstance(value, bool) == (kind is bool)
    if not fits or value == "":
        raise ConfigError(f"{key}={value!r} must be {WORDS[kind]}")
    low, high = RANGES.get(setting, (-math.inf, math.inf))
    if setting in RANGES and not low <= value <= high:
        raise ConfigError(f"{key}={value!r} must lie in [{low:g}, {high:g}]")
    return value


def _sets(name: str, config: EvalConfig) -> str:
    return nearest(name, config.datasets) if config.datasets else "evaluation.datasets names none"
