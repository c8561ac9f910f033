"""The held-out sets of a run, each with the settings it is asked and read with."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from slime_like.config.schema.rollout import DataConfig, EvalConfig


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

    def columns(self, data: DataConfig) -> DataConfig:
        """How its rows are read: as the training data's, but for what the set has of its own."""
        names = ("input_key", "label_key", "metadata_key", "apply_chat_template")
        return replace(data, **{name: getattr(self, name) for name in names if getattr(self, name) is not None})


def eval_sets(config: EvalConfig) -> tuple[EvalSet, ...]:
    """Every held-out set, in the order of ``evaluation.datasets``. The config was checked at load."""
    return tuple(_set(name, path, config, config.overrides.get(name, {})) for name, path in config.datasets.items())


def _set(name: str, path: str, config: EvalConfig, own: Mapping[str, Any]) -> EvalSet:
    shared = EvalSet(
        name=name,
        path=path,
        n_samples_per_prompt=config.n_samples_per_prompt,
        temperature=config.temperature,
        top_p=config.top_p,
        top_k=config.top_k,
        max_response_len=config.max_response_len,
    )
    return replace(shared, **own)
