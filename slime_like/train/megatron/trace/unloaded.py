"""A policy rank with uninitialised weights. Imports megatron, so that ``solo.join`` comes first."""

from __future__ import annotations

from slime_like.train.megatron.rank.trainer import RankTrainer


class UnloadedTrainer(RankTrainer):
    """A rank that reads config.json alone: no weights, no checkpoints."""

    def _load_initial(self) -> None:
        """Keep the weights uninitialised."""

    def _load_weights(self, key: str, folder: str) -> None:
        """Keep the weights uninitialised."""
