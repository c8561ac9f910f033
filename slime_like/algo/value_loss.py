"""Value loss of the critic. The caller sums ``loss * loss_weight``, as for policy losses. Axis: T = tokens."""

from __future__ import annotations

import torch
from torch import Tensor

from slime_like.algo_interfaces import LossOutput


def value_loss(values_T: Tensor, old_values_T: Tensor, returns_T: Tensor, clip: float | None) -> LossOutput:
    """Return ``max((v - R)², (v_clipped - R)²) / 2`` for each token.

    ``v_clipped`` is v clamped to ``[v_old - clip, v_old + clip]``. If ``clip`` is None, return half the squared error,
    ``(v - R)² / 2``. A value outside the interval has a gradient only if R is nearer to ``v_clipped`` than to v, so that
    the update moves it back towards the interval.
    Source: Schulman et al.'s reference implementation of PPO (openai/baselines, ppo2/model.py).
    """
    plain_T = (values_T - returns_T).square()
    means = {"values": values_T.detach(), "returns": returns_T}
    loss_T = plain_T
    if clip is not None:
        bounded_T = torch.clamp(values_T, old_values_T - clip, old_values_T + clip)
        clipped_T = (bounded_T - returns_T).square()
        loss_T = torch.maximum(plain_T, clipped_T)
        means["value_clipfrac"] = (clipped_T > plain_T).to(values_T.dtype)
    loss_T = loss_T / 2
    return LossOutput(loss=loss_T, means={"value_loss": loss_T.detach(), **means}, maxima={})
