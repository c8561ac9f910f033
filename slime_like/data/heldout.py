"""Held-out sets of a run, with their settings."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from slime_like.config.schema.rollout import DataConfig, EvalConfig


@dataclass(frozen=True, slots=True)
class EvalSet:
    """Settings of one held-out set. None means the value of the run; for ``rm_type``, it means the value of each row."""

    name: str
    path: str
    n_samples_per_prompt: int
    temperature: float
    top_p: float
    top_k: int
    max_response_len: int | None = None  # rollout.max_response_len
    rm_type: str | None = None  # reward of every row; overrides the row's
    input_key: str | None = None  # this and the following keys override data.*
    label_key: str | None = None
    metadata_key: str | None = None
    apply_chat_template: bool | None = None

    def columns(self, data: DataConfig) -> DataConfig:
        """Return the data config of this set: ``data`` with the set's overrides."""
        names = ("input_key", "label_key", "metadata_key", "apply_chat_template")
        return replace(data, **{name: getattr(self, name) for name in names if getattr(self, name) is not None})


def eval_sets(config: EvalConfig) -> tuple[EvalSet, ...]:
    """Return the held-out sets in the order of ``evaluation.datasets``. Their overrides were validated with the config."""
    return tuple(_set(name, path, config, config.overrides.get(name, {})) for name, path in config.datasets.items())


def _set(name: str, path: str, config: EvalConfig, overrides: Mapping[str, Any]) -> EvalSet:
    common_settings = EvalSet(
        name=name,
        path=path,
        n_samples_per_prompt=config.n_samples_per_prompt,
        temperature=config.temperature,
        top_p=config.top_p,
        top_k=config.top_k,
        max_response_len=config.max_response_len,
    )
    return replace(common_settings, **overrides)
