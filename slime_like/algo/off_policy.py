"""Corrections for tokens that were sampled from another policy than the one that is trained."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from slime_like.algo.kl import MAX_LOG_RATIO


@dataclass(frozen=True, slots=True)
class ImportanceWeight:
    """Weights of tokens and what truncation did to them. No gradient flows through either."""

    weight: Tensor  # [T], truncated: multiply the loss by it
    raw: Tensor  # [T], before truncation


def truncated_importance(old_logprobs: Tensor, rollout_logprobs: Tensor, clip: float) -> ImportanceWeight:
    """``min(pi_old / pi_rollout, clip)`` per token: corrects an engine that samples from slightly other probabilities.

    Truncation bounds the variance; the bias it leaves is towards tokens that the engine made too rare.
    Source: Yao et al. 2025, "Your Efficient RL Framework Secretly Brings You Off-Policy RL Training" (TIS).
    """
    raw = (old_logprobs - rollout_logprobs).detach().clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
    return ImportanceWeight(weight=raw.clamp(max=clip), raw=raw)
