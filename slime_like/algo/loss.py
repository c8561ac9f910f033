"""Per-token losses, constructed from their config (table LOSSES), and estimators of KL (table KL_ESTIMATORS).

The caller sums ``loss * loss_weight``, so a loss does not depend on packing, micro-batches or ranks. A policy loss consists of
a surrogate, off-policy corrections, KL and entropy. A surrogate computes a loss from advantages and the ratio of new to old
policy. The log of this ratio is clamped to ±20 to keep losses finite, because infinity times a weight of 0 would be nan.
Axes: T = tokens, S = sequences, N = trained tokens on this rank.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from slime_like.algo.bind import bind_off_policy
from slime_like.algo.off_policy import OffPolicy
from slime_like.algo_interfaces import LossFn, LossOutput, LossView, Reduce
from slime_like.config.schema.names import KL_ESTIMATORS
from slime_like.config.schema.policy import MAX_LOG_RATIO, AlgoConfig, PolicyConfig, PolicyGradientConfig
from slime_like.registry import resolve

MAX_KL_LOG_RATIO = 80.0  # exp(80) = 6e34 is finite in float32; infinity times a loss weight of 0 would be nan
MAX_LOW_VAR_KL = 10.0


@dataclass(frozen=True, slots=True)
class Surrogate:
    """Surrogate loss with its metrics; only ``loss_T`` carries a gradient."""

    loss_T: Tensor  # [T]
    means: dict[str, Tensor]  # [T], averaged with loss_weight
    maxima: dict[str, Tensor]  # [T], maximum over tokens


@dataclass(slots=True)
class PolicyLoss:
    """Policy loss: a surrogate with optional off-policy corrections, KL to the reference and entropy bonus."""

    config: PolicyConfig
    surrogate: Callable[[LossView, Tensor], Surrogate]
    kl: Callable[[Tensor, Tensor], Tensor]
    correct: OffPolicy
    needs_entropy: bool

    def __call__(self, view: LossView) -> LossOutput:
        """Return the [T] loss and its metrics. A metric that slime also has is named as in slime.

        The old policy is that of ``old_logprobs`` or, if ``old_logprobs`` is None, the current policy. The ratio's
        denominator is the engine's policy if ``algo.use_rollout_logprobs``, otherwise the old policy. If the denominator is
        the current policy, the ratio is 1 but, except in CISPO, carries a gradient. With GSPO or rejection, this is a
        collective over the ranks that share the sequences.
        """
        cfg = self.config
        old_logprobs_T = view.logprobs.detach() if view.old_logprobs is None else view.old_logprobs
        surrogate = self.surrogate(view, view.rollout_logprobs if cfg.use_rollout_logprobs else old_logprobs_T)
        corrections = self.correct(cfg, old_logprobs_T, view.rollout_logprobs, view.sequences)
        means = surrogate.means | corrections.means
        loss_T = surrogate.loss_T if corrections.weight is None else surrogate.loss_T * corrections.weight
        if corrections.keep is not None:
            loss_T = loss_T * corrections.keep
        means["pg_loss"] = loss_T.detach()
        if cfg.kl_loss_coef > 0:
            assert view.ref_logprobs is not None, "algo.kl_loss_coef > 0 needs reference log-probabilities"
            kl_T = self.kl(view.logprobs, view.ref_logprobs)
            loss_T = loss_T + cfg.kl_loss_coef * (kl_T if corrections.keep is None else kl_T * corrections.keep)
            means["kl_loss"] = kl_T.detach()
        if view.entropy is not None:
            bonus_T = cfg.entropy_coef * view.entropy
            loss_T = loss_T - (bonus_T if corrections.keep is None else bonus_T * corrections.keep)
            means["entropy_loss"] = view.entropy.detach()
        return LossOutput(loss=loss_T, means=means, maxima=surrogate.maxima)


@dataclass(slots=True)
class SftLoss:
    """Negative log-likelihood of the demonstrated tokens."""

    needs_entropy: bool = False

    def __call__(self, view: LossView) -> LossOutput:
        """Return the [T] loss."""
        loss_T = -view.logprobs
        return LossOutput(loss=loss_T, means={"sft_loss": loss_T.detach()}, maxima={})


def policy_gradient(cfg: PolicyGradientConfig) -> LossFn:
    """Return the loss function of PPO: clipped policy gradient with a ratio per token."""
    return _policy_loss(cfg, partial(ppo_surrogate, cfg))


def gspo(cfg: PolicyGradientConfig) -> LossFn:
    """Return the loss function of GSPO: clipped policy gradient with a ratio per sequence."""
    return _policy_loss(cfg, partial(gspo_surrogate, cfg))


def cispo(cfg: PolicyConfig) -> LossFn:
    """Return the loss function of CISPO: policy gradient weighted by the clipped ratio."""
    return _policy_loss(cfg, partial(cispo_surrogate, cfg))


def _policy_loss(cfg: PolicyConfig, surrogate: Callable[[LossView, Tensor], Surrogate]) -> LossFn:
    kl = resolve("algo.kl_loss_type", cfg.kl_loss_type, KL_ESTIMATORS)
    correct = bind_off_policy(cfg)
    return PolicyLoss(config=cfg, surrogate=surrogate, kl=kl, correct=correct, needs_entropy=cfg.entropy_coef != 0)


def sft(cfg: AlgoConfig) -> LossFn:
    """Return the supervised loss. It does not depend on ``cfg``."""
    return SftLoss()


def clip_range(config: PolicyConfig) -> tuple[float, float]:
    """Return the bounds (low, high) to which ratios are clipped."""
    high = config.eps_clip if config.eps_clip_high is None else config.eps_clip_high
    return 1 - config.eps_clip, 1 + high


def ppo_surrogate(config: PolicyGradientConfig, view: LossView, old_logprobs_T: Tensor) -> Surrogate:
    """Return PPO's clipped surrogate.

    Source: Schulman et al. 2017, arXiv:1707.06347, equation 7.
    """
    return _clip(config, _clamp(view.logprobs - old_logprobs_T), view, old_logprobs_T)


def gspo_surrogate(config: PolicyGradientConfig, view: LossView, old_logprobs_T: Tensor) -> Surrogate:
    """Return GSPO's clipped surrogate, with the ratio ``(pi(y) / pi_old(y)) ** (1 / |y|)`` at each token of sequence y.

    If all tokens of a sequence have the same advantage, they have the same loss. With ``algo.aggregation=sequence_mean``, all
    episodes have the same weight. A collective over the ranks that share the sequences.
    Source: Zheng et al. 2025, Group Sequence Policy Optimization, arXiv:2507.18071, equations 5 and 7.
    """
    assert view.sequences is not None, "GSPO's ratio needs sequences"
    log_ratio_S = view.sequences.mean(view.logprobs - old_logprobs_T)
    surrogate = _clip(config, view.sequences.spread(_clamp(log_ratio_S)), view, old_logprobs_T)
    return Surrogate(surrogate.loss_T, surrogate.means, {"seq_ratio_max": surrogate.means["ois"]})


def cispo_surrogate(config: PolicyConfig, view: LossView, old_logprobs_T: Tensor) -> Surrogate:
    """Return CISPO's surrogate: log-likelihood weighted by advantage and clipped ratio. The ratio carries no gradient.

    Source: MiniMax 2025, MiniMax-M1, arXiv:2506.13585, equations 4 and 5.
    """
    low, high = clip_range(config)
    ratio_T = _clamp((view.logprobs - old_logprobs_T).detach()).exp()
    weight_T = ratio_T.clamp(low, high)
    means = _means(view, old_logprobs_T, ratio_T) | {"pg_clipfrac": (weight_T != ratio_T).to(ratio_T.dtype)}
    return Surrogate(-weight_T * _advantages(view) * view.logprobs, means, {})


def _clip(config: PolicyGradientConfig, log_ratio_T: Tensor, view: LossView, old_logprobs_T: Tensor) -> Surrogate:
    """Return the larger of the unclipped and the clipped loss.

    If ``eps_clip_c`` is set, the loss at a negative advantage is at most ``eps_clip_c`` times the absolute advantage
    (dual clip).

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
        bound_T = -config.eps_clip_c * advantages_T
        is_bounded_T = (advantages_T < 0) & (loss_T > bound_T)
        loss_T = torch.where(is_bounded_T, bound_T, loss_T)
        means["pg_clipfrac_lower"] = is_bounded_T.to(loss_T.dtype)
    return Surrogate(loss_T, means, {})


def _means(view: LossView, old_logprobs_T: Tensor, ratio_T: Tensor) -> dict[str, Tensor]:
    return {"ppo_kl": (old_logprobs_T - view.logprobs).detach(), "ois": ratio_T}


def _advantages(view: LossView) -> Tensor:
    assert view.advantages is not None, "a policy gradient needs advantages"
    return view.advantages


def _clamp(log_ratio: Tensor) -> Tensor:
    return log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)


# Estimators of KL(p || q) per token, p = policy and q = reference, at tokens sampled from p.
# Source: J. Schulman 2020, "Approximating KL divergence", http://joschu.net/blog/kl-approx.html.


def k1(logprobs_T: Tensor, ref_logprobs_T: Tensor) -> Tensor:
    """Return ``log p - log q``: unbiased, high variance, negative for some tokens."""
    return logprobs_T - ref_logprobs_T


def k2(logprobs_T: Tensor, ref_logprobs_T: Tensor) -> Tensor:
    """Return ``(log p - log q)² / 2``: biased, low variance, never negative."""
    return (logprobs_T - ref_logprobs_T).square() / 2


def k3(logprobs_T: Tensor, ref_logprobs_T: Tensor) -> Tensor:
    """Return ``q/p - 1 - log(q/p)``: unbiased, low variance, never negative.

    Where q > p, value and gradient grow with ``q/p``: one token that the policy has made improbable can outweigh a batch.
    ``log(q/p)`` is clamped to at most 80; where it is clamped, the gradient is zero.
    """
    log_ratio_T = (ref_logprobs_T - logprobs_T).clamp(max=MAX_KL_LOG_RATIO)
    return log_ratio_T.expm1() - log_ratio_T


def low_var_kl(logprobs_T: Tensor, ref_logprobs_T: Tensor) -> Tensor:
    """Return the KL estimate ``k3``, clamped to at most 10. Where ``k3`` exceeds 10, the gradient is zero.

    Source: ``low_var_kl`` in slime (``slime/utils/ppo_utils.py``) and in verl (``verl/trainer/ppo/core_algos.py``,
    where it is also called ``k3``).
    """
    return k3(logprobs_T, ref_logprobs_T).clamp(max=MAX_LOW_VAR_KL)


@dataclass(frozen=True, slots=True)
class PackedSequences:
    """Reductions over the S sequences of one micro-batch with N trained tokens on this rank (protocol ``Sequences``).

    Under context parallelism a rank holds a part of each sequence, and ``reduce`` sums over the context parallel group.
    It also sums gradients in the backward pass, because the loss of each rank depends on the tokens of the other ranks.
    """

    index_N: Tensor  # I64 [N], sequence index of each token
    num_trained_S: Tensor  # F [S], trained tokens of each sequence over all ranks
    reduce: Reduce  # differentiable sum over the ranks that share the sequences

    def sum(self, values_N: Tensor) -> Tensor:
        """Return [S]: the sum over the trained tokens of each sequence.

        A collective over the ranks that share the sequences.
        """
        zeros_S = torch.zeros(len(self.num_trained_S), dtype=values_N.dtype, device=values_N.device)
        return self.reduce.sum(zeros_S.index_add(0, self.index_N, values_N))

    def mean(self, values_N: Tensor) -> Tensor:
        """Return [S]: the mean over the trained tokens of each sequence, 0 if it has none.

        A collective, like ``sum``.
        """
        return self.sum(values_N) / self.num_trained_S.to(values_N.dtype).clamp(min=1)

    def spread(self, values_S: Tensor) -> Tensor:
        """Return [N]: the value of each token's sequence, from ``values_S``."""
        return values_S[self.index_N]
