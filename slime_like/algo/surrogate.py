"""Policy-gradient surrogates: loss per token from its advantage and the ratio of new to old policy.

Each takes the view and the old policy's [T] log-probabilities and returns the [T] loss to minimise, with metrics.
The log ratio is clamped to ±20, so that no token makes the loss infinite. Axes: T = tokens, S = sequences.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from slime_like.algo.kl import MAX_LOG_RATIO
from slime_like.config.schema.policy import PolicyConfig, PolicyGradientConfig
from slime_like.interfaces import LossView


@dataclass(frozen=True, slots=True)
class Surrogate:
    """Surrogate loss and metrics; only ``loss`` carries a gradient."""

    loss: Tensor  # [T]
    means: dict[str, Tensor]  # [T], averaged with loss_weight
    maxima: dict[str, Tensor]  # [T]


def clip_range(config: PolicyConfig) -> tuple[float, float]:
    """Return minimum and maximum ratio."""
    high = config.eps_clip if config.eps_clip_high is None else config.eps_clip_high
    return 1 - config.eps_clip, 1 + high


def per_token(config: PolicyGradientConfig, view: LossView, old_logprobs_T: Tensor) -> Surrogate:
    """PPO's clipped surrogate. Source: Schulman et al. 2017, arXiv:1707.06347, equation 7."""
    return _clipped(config, _bounded(view.logprobs - old_logprobs_T), view, old_logprobs_T)


def per_sequence(config: PolicyGradientConfig, view: LossView, old_logprobs_T: Tensor) -> Surrogate:
    """GSPO: the clipped surrogate with one ratio per sequence, ``(pi(y) / pi_old(y)) ** (1 / |y|)``, at each token.

    All tokens of a sequence have the same loss, so ``sequence_mean`` weights sum to one loss per sequence.
    Source: Zheng et al. 2025, Group Sequence Policy Optimization, arXiv:2507.18071, equations 5 and 7.
    """
    assert view.sequences is not None, "GSPO's ratio needs sequences"
    log_ratio_S = view.sequences.mean(view.logprobs - old_logprobs_T)
    surrogate = _clipped(config, view.sequences.spread(_bounded(log_ratio_S)), view, old_logprobs_T)
    return Surrogate(surrogate.loss, surrogate.means, {"seq_ratio_max": surrogate.means["ois"]})


def weighted(config: PolicyConfig, view: LossView, old_logprobs_T: Tensor) -> Surrogate:
    """CISPO: log-likelihood weighted by advantage and clipped ratio; the ratio carries no gradient.

    Source: MiniMax 2025, MiniMax-M1, arXiv:2506.13585, equations 4 and 5.
    """
    low, high = clip_range(config)
    ratio_T = _bounded((view.logprobs - old_logprobs_T).detach()).exp()
    weight_T = ratio_T.clamp(low, high)
    means = _means(view, old_logprobs_T, ratio_T) | {"pg_clipfrac": (weight_T != ratio_T).to(ratio_T.dtype)}
    return Surrogate(-weight_T * _advantages(view) * view.logprobs, means, {})


def _clipped(config: PolicyGradientConfig, log_ratio_T: Tensor, view: LossView, old_logprobs_T: Tensor) -> Surrogate:
    """Return the larger of plain and clipped loss; dual clip bounds the loss of negative advantages.

    Source of dual clip: Ye et al. 2020, Mastering Complex Control in MOBA Games, arXiv:1912.09729, equation 4.
    """
    low, high = clip_range(config)
    advantages_T = _advantages(view)
    ratio_T = log_ratio_T.exp()
    plain_T = -ratio_T * advantages_T
    clipped_T = -ratio_T.clamp(low, high) * advantages_T
    loss_T = torch.maximum(plain_T, clipped_T)
    means = _means(view, old_logprobs_T, ratio_T.detach()) | {"pg_clipfrac": (clipped_T > plain_T).to(loss_T.dtype)}
    if config.eps_clip_c is not None:
        ceiling_T = -config.eps_clip_c * advantages_T
        is_bounded_T = (advantages_T < 0) & (loss_T > ceiling_T)
        loss_T = torch.where(is_bounded_T, ceiling_T, loss_T)
        means["pg_clipfrac_lower"] = is_bounded_T.to(loss_T.dtype)
    return Surrogate(loss_T, means, {})


def _means(view: LossView, old_logprobs_T: Tensor, ratio_T: Tensor) -> dict[str, Tensor]:
    return {"ppo_kl": (old_logprobs_T - view.logprobs).detach(), "ois": ratio_T}


def _advantages(view: LossView) -> Tensor:
    assert view.advantages is not None, "a policy gradient needs advantages"
    return view.advantages


def _bounded(log_ratio: Tensor) -> Tensor:
    return log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
