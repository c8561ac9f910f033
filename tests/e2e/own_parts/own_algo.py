"""A user's algorithm. Every command imports this file, so it imports no torch."""

from __future__ import annotations

from dataclasses import dataclass

from own_record import record

from slime_like.config.schema.algo import ReinforcePlusPlusBaselineConfig
from slime_like.config.schema.base import key


@dataclass(kw_only=True)
class OwnAlgoConfig(ReinforcePlusPlusBaselineConfig):
    """Algorithm with a group advantage, a token advantage and a loss of its own."""

    loss: str = key("own_loss", "Token loss.")
    group_advantage: str | None = key("own_group_advantage", "Advantage from the rewards of a group.")
    token_advantage: str | None = key("own_token_advantage", "Advantage per token.")
    own_weight: float = key(1.0, "Weight of every token in the policy-gradient term.")

    def check(self, prefix: str) -> None:
        super().check(prefix)
        record("algorithm")
