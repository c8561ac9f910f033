"""Policy-gradient surrogates: what becomes of an advantage and the ratio of the new to the old policy, per token.

Each takes the view and the old policy's [T] log-probabilities and returns the [T] objective to minimise, with metrics.
The ratio's logarithm is held within ±20, so that no token can make the loss infinite.
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
    """``loss`` carries the gradient, metrics do not."""

    loss: Tensor  # [T]
    means: dict[str, Tensor]  # [T], averaged with loss_weight
    maxima: dict[str, Tensor]  # [T]


def clip_range(config: PolicyConfig) -> tuple[float, float]:
    """Smallest and largest ratio."""
    high = config.eps_clip if config.eps_clip_high is None else config.eps_clip_high
    return 1 - config.eps_clip, 1 + high


def per_token(config: PolicyGradientConfig, view: LossView, old: Tensor) -> Surrogate:
    """PPO's clipped surrogate. Source: Schulman et al. 2017, arXiv:1707.06347, equation 7."""
    return _clipped(config, _bounded(view.logprobs - old), view, old)


def per_sequence(config: PolicyGradientConfig, view: LossView, old: Tensor) -> Surrogate:
    """The same with one ratio per sequence, ``(pi(y) / pi_old(y)) ** (1 / |y|)``, at each of its tokens.

    Every token of a sequence has the same loss, so that ``sequence_mean`` weights add up to one loss per sequence.
    Source: Zheng et al. 2025, Group Sequence Policy Optimization, arXiv:2507.18071, equations 5 and 7.
    """
    assert view.sequences is not None, "GSPO's ratio is one of whole sequences"
    log_ratio_S = view.sequences.mean(view.logprobs - old)
    found = _clipped(config, view.sequences.spread(_bounded(log_ratio_S)), view, old)
    return Surrogate(found.loss, found.means, {"seq_ratio_max": found.means["ois"]})


def weighted(config: PolicyConfig, view: LossView, old: Tensor) -> Surrogate:
    """CISPO: log-likelihood weighted by advantage and clipped ratio; the ratio carries no gradient.

    Source: MiniMax 2025, MiniMax-M1, arXiv:2506.13585, equations 4 and 5.
    """
    low, high = clip_range(config)
    ratio = _bounded((view.logprobs - old).detach()).exp()
    weight = ratio.clamp(low, high)
    means = _means(view, old, ratio) | {"pg_clipfrac": (weight != ratio).to(ratio.dtype)}
    return Surrogate(-weight * _advantages(view) * view.logprobs, means, {})


def _clipped(config: PolicyGradientConfig, log_ratio: Tensor, view: LossView, old: Tensor) -> Surrogate:
    """Pessimistic one of the plain and the clipped objective; dual clip bounds what a negative advantage may cost.

    Source of dual clip: Ye et al. 2020, Mastering Complex Control in MOBA Games, arXiv:1912.09729, equation 4.
    """
    low, high = clip_range(config)
    advantages = _advantages(view)
    ratio = log_ratio.exp()
    plain = -ratio * advantages
    clipped = -ratio.clamp(low, high) * advantages
    loss = torch.maximum(plain, clipped)
    means = _means(view, old, ratio.detach()) | {"pg_clipfrac": (clipped > plain).to(loss.dtype)}
    if config.eps_clip_c is not None:
        ceiling = -config.eps_clip_c * advantages
        bound = (advantages < 0) & (loss > ceiling)
        loss = torch.where(bound, ceiling, loss)
        means["pg_clipfrac_lower"] = bound.to(loss.dtype)
    return Surrogate(loss, means, {})


def _means(view: LossView, old: Tensor, ratio: Tensor) -> dict[str, Tensor]:
    return {"ppo_kl": (old - view.logprobs).detach(), "ois": ratio}


def _advantages(view: LossView) -> Tensor:
    assert view.advantages is not None, "a policy gradient needs advantages"
    return view.advantages


def _bounded(log_ratio: Tensor) -> Tensor:
    return log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
