"""Composition of a row's reward from weighted components."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from slime_like.config.schema.reward_names import ROW
from slime_like.config.schema.rollout import RewardConfig
from slime_like.types import Reward


def row_reward(config: RewardConfig, rm_type: str | None) -> str:
    """Return the reward name of a row: its rm_type, or ``reward.name`` if that is a path or the row has no rm_type."""
    return config.name if rm_type is None or ":" in config.name else rm_type


def components(config: RewardConfig, rm_type: str | None, *, unshaped: bool = False) -> Mapping[str, float]:
    """Return name -> weight of the rewards of a row.

    With ``unshaped`` (evaluation), only ``row_reward`` is returned if ``rm_type`` is among the weights.

    Example: ``weights={"rm_type": 1.0, "my:f": 0.1}`` and a row of rm_type ``math`` give ``{"math": 1.0, "my:f": 0.1}``.
    """
    if not config.weights or (unshaped and ROW in config.weights):
        return {row_reward(config, rm_type): 1.0}
    weights: dict[str, float] = {}
    for key, weight in config.weights.items():
        name = row_reward(config, rm_type) if key == ROW else key
        weights[name] = weights.get(name, 0.0) + weight
    return weights


def compose(weights: Mapping[str, float], parts: Sequence[Reward]) -> Reward:
    """Return a reward with the weighted sum of the scores of ``parts`` and their first accuracy.

    A single part of weight 1 is returned unchanged.
    """
    if len(parts) == 1 and list(weights.values()) == [1.0]:
        return parts[0]
    score = sum(weight * part.score for weight, part in zip(weights.values(), parts, strict=True))
    accuracy = next((part.accuracy for part in parts if part.accuracy is not None), None)
    return Reward(score, accuracy, tuple((name, part.score) for name, part in zip(weights, parts, strict=True)))
