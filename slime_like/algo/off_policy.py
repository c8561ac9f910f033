"""Corrections for tokens that were sampled from another policy than the one that is trained: TIS, MIS, rejection.

All compare the old policy (the trainer's, before the update) with the rollout policy (the engine's) at sampled tokens.
No gradient flows through any of them, and none changes a denominator: what is dropped counts as zero.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from slime_like.algo.kl import MAX_LOG_RATIO
from slime_like.config.schema.policy import PolicyConfig
from slime_like.interfaces import Sequences


@dataclass(frozen=True, slots=True)
class ImportanceWeight:
    """Weights of tokens and the ratios they come from."""

    weight: Tensor  # [T], multiply the loss by it
    raw: Tensor  # [T], pi_old / pi_rollout


@dataclass(frozen=True, slots=True)
class Correction:
    """What the configured corrections do to a micro-batch, with their metrics."""

    weight: Tensor | None  # [T], of the policy gradient
    keep: Tensor | None  # [T], 0 in rejected sequences: of every term of the loss
    means: dict[str, Tensor]  # [T]


class OffPolicy(Protocol):
    """``algo.off_policy`` (table OFF_POLICY). ``sequences`` is None where a rank holds no whole sequences."""

    def __call__(
        self, config: PolicyConfig, old_logprobs: Tensor, rollout_logprobs: Tensor, sequences: Sequences | None, /
    ) -> Correction: ...


def truncated_importance(
    old_logprobs: Tensor, rollout_logprobs: Tensor, clip: float, low: float = 0.0
) -> ImportanceWeight:
    """``pi_old / pi_rollout`` per token, held in ``[low, clip]``: corrects an engine that samples from slightly other
    probabilities.

    Truncation bounds the variance; the bias it leaves is towards tokens that the engine made too rare.
    Source: Yao et al. 2025, "Your Efficient RL Framework Secretly Brings You Off-Policy RL Training" (TIS).
    """
    raw = _ratio(old_logprobs, rollout_logprobs)
    return ImportanceWeight(weight=raw.clamp(min=low, max=clip), raw=raw)


def masked_importance(old_logprobs: Tensor, rollout_logprobs: Tensor, low: float, high: float) -> ImportanceWeight:
    """``pi_old / pi_rollout`` per token inside ``[low, high]``, 0 outside: a token on which engine and trainer disagree
    that much teaches nothing.

    Source: Ling team 2025, "Every Step Evolves", arXiv:2510.18855 (IcePop).
    """
    raw = _ratio(old_logprobs, rollout_logprobs)
    return ImportanceWeight(weight=torch.where((raw >= low) & (raw <= high), raw, torch.zeros_like(raw)), raw=raw)


def sequence_ratio(old_logprobs: Tensor, rollout_logprobs: Tensor, sequences: Sequences, *, geometric: bool) -> Tensor:
    """[T] ratio of old to rollout policy of each token's whole sequence: the product over its tokens, or their geometric
    mean, which does not grow with length.

    Source: Liu et al. 2025, "When Speed Kills Stability" (sequence-level and geometric masks).
    """
    log_ratio = (old_logprobs - rollout_logprobs).detach()
    total = sequences.mean(log_ratio) if geometric else sequences.sum(log_ratio)
    return sequences.spread(total).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()


def correction(
    config: PolicyConfig, old_logprobs: Tensor, rollout_logprobs: Tensor, sequences: Sequences | None
) -> Correction:
    """What ``config`` asks for, at [T] tokens. Metrics are those of every trained token, dropped ones included."""
    weight, keep, means = None, None, dict[str, Tensor]()
    if config.use_tis:
        tis = truncated_importance(old_logprobs, rollout_logprobs, config.tis_clip, config.tis_clip_low)
        weight = tis.weight
        means |= {"tis": tis.raw, "tis_abs": (tis.raw - 1).abs()}
        means["tis_clipfrac"] = (tis.weight != tis.raw).to(tis.raw.dtype)
    if config.use_mis:
        mis = masked_importance(old_logprobs, rollout_logprobs, config.mis_low, config.mis_high)
        weight = mis.weight
        means |= {"mis": mis.raw, "mis_abs": (mis.raw - 1).abs()}
        means["mis_maskfrac_low"] = (mis.raw < config.mis_low).to(mis.raw.dtype)
        means["mis_maskfrac_high"] = (mis.raw > config.mis_high).to(mis.raw.dtype)
    if config.rejection != "none":
        assert sequences is not None, "rejection speaks of sequences"
        ratio = sequence_ratio(old_logprobs, rollout_logprobs, sequences, geometric=config.rejection == "geometric")
        low = 0.0 if config.rejection_low is None else config.rejection_low
        high = float("inf") if config.rejection_high is None else config.rejection_high
        keep = ((ratio >= low) & (ratio <= high)).to(ratio.dtype)
        means |= {"rejection_ratio": ratio, "rejection_frac": 1 - keep}
    return Correction(weight, keep, means)


def _ratio(old_logprobs: Tensor, rollout_logprobs: Tensor) -> Tensor:
    return (old_logprobs - rollout_logprobs).detach().clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
