"""Corrections for tokens sampled from a policy other than the trained one.

They are truncated importance sampling (TIS), masked importance sampling (MIS) and the rejection of sequences. A correction
compares the old policy (the trainer's, before the update) with the rollout policy (the engine's) at sampled tokens.
Corrections carry no gradient and leave ``loss_weight`` unchanged: a token dropped by MIS contributes 0 to the policy-gradient
term, a token of a rejected sequence contributes 0 to every term, and the weights of the other tokens do not increase.
The log of each ratio is clamped to ±20.
Axis: T = tokens.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from slime_like.algo_interfaces import Sequences
from slime_like.config.schema.policy import MAX_LOG_RATIO, PolicyConfig


@dataclass(frozen=True, slots=True)
class ImportanceWeight:
    """Importance weights of tokens, before and after truncation or masking."""

    weight_T: Tensor  # [T], factor of the policy-gradient term
    raw_T: Tensor  # [T], pi_old / pi_rollout


@dataclass(frozen=True, slots=True)
class Correction:
    """Corrections of a micro-batch, with their metrics. A factor that the config does not enable is None."""

    weight: Tensor | None  # [T], factor of the policy-gradient term
    keep: Tensor | None  # [T], factor of every loss term: 0 in rejected sequences, else 1
    means: dict[str, Tensor]  # [T], averaged with loss_weight into metrics train/<name>


class OffPolicy(Protocol):
    """Function for ``algo.off_policy`` (table OFF_POLICY). Rejection needs ``sequences`` to reduce over whole sequences."""

    def __call__(
        self, config: PolicyConfig, old_logprobs_T: Tensor, rollout_logprobs_T: Tensor, sequences: Sequences | None, /
    ) -> Correction: ...


def truncated_importance(
    old_logprobs_T: Tensor, rollout_logprobs_T: Tensor, clip: float, low: float = 0.0
) -> ImportanceWeight:
    """Return ``pi_old / pi_rollout`` per token, clamped to ``[low, clip]``.

    Truncation bounds the variance. It leaves a bias at tokens whose ratio is outside ``[low, clip]``.
    Source: Yao et al. 2025, "Your Efficient RL Framework Secretly Brings You Off-Policy RL Training" (TIS).
    """
    raw_T = _ratio(old_logprobs_T, rollout_logprobs_T)
    return ImportanceWeight(weight_T=raw_T.clamp(min=low, max=clip), raw_T=raw_T)


def masked_importance(old_logprobs_T: Tensor, rollout_logprobs_T: Tensor, low: float, high: float) -> ImportanceWeight:
    """Return ``pi_old / pi_rollout`` per token if it is in ``[low, high]``, else 0.

    This drops tokens on which engine and trainer disagree strongly.

    Source: Ling team 2025, "Every Step Evolves", arXiv:2510.18855 (IcePop).
    """
    raw_T = _ratio(old_logprobs_T, rollout_logprobs_T)
    return ImportanceWeight(
        weight_T=torch.where((raw_T >= low) & (raw_T <= high), raw_T, torch.zeros_like(raw_T)), raw_T=raw_T
    )


def sequence_ratio(
    old_logprobs_T: Tensor, rollout_logprobs_T: Tensor, sequences: Sequences, *, geometric: bool
) -> Tensor:
    """Return [T]: the ratio of old to rollout policy of each token's sequence.

    It is the product of the ratios of the sequence's tokens or, if ``geometric``, their geometric mean, whose scale
    does not depend on the length. A collective over the ranks that share the sequences.

    Source: Liu et al. 2025, "When Speed Kills Stability" (sequence-level and geometric masks).
    """
    log_ratio_T = (old_logprobs_T - rollout_logprobs_T).detach()
    log_ratio_S = sequences.mean(log_ratio_T) if geometric else sequences.sum(log_ratio_T)
    return sequences.spread(log_ratio_S).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()


def importance_correction(
    config: PolicyConfig, old_logprobs_T: Tensor, rollout_logprobs_T: Tensor, sequences: Sequences | None
) -> Correction:
    """Return the corrections that ``config`` enables. Metrics cover all trained tokens, including dropped ones.

    Unless ``algo.rejection`` is ``none``, this is a collective over the ranks that share the sequences.
    """
    weight_T, keep_T, means = None, None, dict[str, Tensor]()
    if config.use_tis:
        tis = truncated_importance(old_logprobs_T, rollout_logprobs_T, config.tis_clip, config.tis_clip_low)
        weight_T = tis.weight_T
        means |= {"tis": tis.raw_T, "tis_abs": (tis.raw_T - 1).abs()}
        means["tis_clipfrac"] = (tis.weight_T != tis.raw_T).to(tis.raw_T.dtype)
    if config.use_mis:
        mis = masked_importance(old_logprobs_T, rollout_logprobs_T, config.mis_low, config.mis_high)
        weight_T = mis.weight_T
        means |= {"mis": mis.raw_T, "mis_abs": (mis.raw_T - 1).abs()}
        means["mis_maskfrac_low"] = (mis.raw_T < config.mis_low).to(mis.raw_T.dtype)
        means["mis_maskfrac_high"] = (mis.raw_T > config.mis_high).to(mis.raw_T.dtype)
    if config.rejection != "none":
        assert sequences is not None, "algo.rejection needs whole sequences"
        ratio_T = sequence_ratio(
            old_logprobs_T, rollout_logprobs_T, sequences, geometric=config.rejection == "geometric"
        )
        low = 0.0 if config.rejection_low is None else config.rejection_low
        high = float("inf") if config.rejection_high is None else config.rejection_high
        keep_T = ((ratio_T >= low) & (ratio_T <= high)).to(ratio_T.dtype)
        means |= {"rejection_ratio": ratio_T, "rejection_frac": 1 - keep_T}
    return Correction(weight_T, keep_T, means)


def _ratio(old_logprobs_T: Tensor, rollout_logprobs_T: Tensor) -> Tensor:
    return (old_logprobs_T - rollout_logprobs_T).detach().clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
