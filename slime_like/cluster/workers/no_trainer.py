"""The trainer of a run that trains nothing."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from slime_like.errors import SlimeLikeError
from slime_like.types import StepStats


@dataclass(slots=True)
class FrozenTrainer:
    """The trainer of ``run.mode=rollout_only``: the engines keep the weights they started with."""

    version: int

    def step(self, batch: object) -> StepStats:
        """The rollout is done with; the weights are what they were."""
        del batch
        return StepStats(self.version + 1, ())

    def score(self, rows: object, exact: object = None) -> Any:
        """Never asked: there is no push to prove."""
        raise SlimeLikeError("run.mode=rollout_only has no trainer to score with")

    def kernels(self) -> tuple[str, ...]:
        """Nothing was computed."""
        return ()

    def token_advantages(self, sample_ids: object) -> dict[int, Any]:
        """Nothing was trained."""
        del sample_ids
        return {}

    def rest(self) -> None:
        """Nothing ever moves."""

    def begin_save(self, folder: Path, iteration: int) -> None:
        """Nothing was trained."""

    def finish_save(self, *, wait: bool) -> bool:
        """Nothing was begun."""
        del wait
        return True

    def load(self, folder: Path, iteration: int) -> None:
        """Nothing was trained."""

    def export_hf(self, folder: Path) -> None:
        """Nothing was trained."""
