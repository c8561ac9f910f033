"""The critic's loss. As with token losses, the caller multiplies by ``loss_weight`` and sums."""

from __future__ import annotations

import torch
from torch import Tensor

from slime_like.interfaces import LossOutput


def value_loss(values: Tensor, old_values: Tensor, returns: Tensor, clip: float | None) -> LossOutput:
    """``max((v - R)², (v_clipped - R)²) / 2`` with ``v_clipped`` within ``clip`` of the values that advantages came from.

    [T] each; ``clip=None`` leaves the plain squared error. The larger of the two makes clipping pessimistic: it stops a
    value that runs away from its old one, never one that comes back.
    Source: Schulman et al.'s reference implementation of PPO (openai/baselines, ppo2/model.py).
    """
    plain = (values - returns).square()
    means = {"values": values.detach(), "returns": returns}
    loss = plain
    if clip is not None:
        bounded = torch.clamp(values, old_values - clip, old_values + clip)
        clipped = (bounded - returns).square()
        loss = torch.maximum(plain, clipped)
        means["value_clipfrac"] = (clipped > plain).to(values.dtype)
    loss = loss / 2
    return LossOutput(loss=loss, means={"value_loss": loss.detach(), **means}, maxima={})
