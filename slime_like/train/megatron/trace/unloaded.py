"""A policy rank with uninitialised weights. This module imports megatron, so import it after ``solo.join``."""

from __future__ import annotations

from slime_like.train.megatron.rank.trainer import RankTrainer


class UnloadedTrainer(RankTrainer):
    """A rank that reads only config.json: no weights, no checkpoints."""

    def _load_initial(self) -> None:
        """Keep the weights uninitialised."""

    def _load_weights(self, key: str, folder: str) -> None:
        """Keep the weights uninitialised."""
