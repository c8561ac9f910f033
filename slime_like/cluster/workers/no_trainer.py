"""Trainer of a run that trains nothing."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from slime_like.errors import SlimeLikeError
from slime_like.types import StepStats


@dataclass(slots=True)
class FrozenTrainer:
    """Trainer of ``run.mode=rollout_only``: the engines keep their initial weights."""

    version: int

    def step(self, batch: object) -> StepStats:
        """Return no metrics, and ``version + 1`` as after a step. The attribute ``version`` itself does not change."""
        del batch
        return StepStats(self.version + 1, ())

    def score(self, batch: object, float64_kind: object = None) -> Any:
        """Raise ``SlimeLikeError``: there is no model to score with."""
        raise SlimeLikeError("run.mode=rollout_only has no trainer to score with")

    def kernels(self) -> tuple[str, ...]:
        """Return no kernels."""
        return ()

    def token_advantages(self, sample_ids: object) -> dict[int, Any]:
        """Return no advantages."""
        del sample_ids
        return {}

    def release_communicators(self) -> None:
        """Do nothing: there are no communicators."""

    def begin_save(self, folder: Path, iteration: int) -> None:
        """Do nothing: there are no trained weights."""

    def finish_save(self, *, wait: bool) -> bool:
        """Return True: no save is pending."""
        del wait
        return True

    def load(self, folder: Path, iteration: int) -> None:
        """Do nothing: there are no trained weights."""

    def export_hf(self, folder: Path) -> None:
        """Do nothing: there are no trained weights."""
