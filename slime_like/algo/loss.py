"""Token losses bound to their config (table LOSSES). The caller multiplies by ``loss_weight`` and sums; losses
do not depend on packing, micro-batches or ranks.

A policy loss is a surrogate, which maps advantages and the ratio of new to old policy to a [T] loss, with corrections, KL and
entropy. Values are finite also at untrained tokens: infinity times a weight of 0 would be nan. For the same reason the log
ratio is clamped to ±20. Axes: T = tokens, S = sequences.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from slime_like.algo.bind import bind_off_policy
from slime_like.algo.kl import MAX_LOG_RATIO
from slime_like.algo.off_policy import OffPolicy
from slime_like.config.schema.names import KL_ESTIMATORS
from slime_like.config.schema.policy import AlgoConfig, PolicyConfig, PolicyGradientConfig
from slime_like.interfaces import LossFn, LossOutput, LossView, Reduce
from slime_like.registry import resolve


@dataclass(frozen=True, slots=True)
class Surrogate:
    """Surrogate loss and metrics; only ``loss`` carries a gradient."""

    loss: Tensor  # [T]
    means: dict[str, Tensor]  # [T], averaged with loss_weight
    maxima: dict[str, Tensor]  # [T]


@dataclass(slots=True)
class PolicyLoss:
    """Policy loss: a surrogate with optional off-policy corrections, KL to the reference and entropy bonus."""

    config: PolicyConfig
    surrogate: Callable[[LossView, Tensor], Surrogate]
    kl: Callable[[Tensor, Tensor], Tensor]
    correct: OffPolicy
    needs_entropy: bool

    def __call__(self, view: LossView) -> LossOutput:
        """Return the [T] loss and metrics with slime's names (``train/<name>``).

        ``old_logprobs=None`` marks the first update after the rollout: the ratio is 1 and only its
        gradient counts.
        """
        cfg = self.config
        old_logprobs_T = view.logprobs.detach() if view.old_logprobs is None else view.old_logprobs
        surrogate = self.surrogate(view, view.rollout_logprobs if cfg.use_rollout_logprobs else old_logprobs_T)
        corrections = self.correct(cfg, old_logprobs_T, view.rollout_logprobs, view.sequences)
        means = surrogate.means | corrections.means
        loss_T = surrogate.loss if corrections.weight is None else surrogate.loss * corrections.weight
        if corrections.keep is not None:
            loss_T = loss_T * corrections.keep
        means["pg_loss"] = loss_T.detach()
        if cfg.kl_loss_coef > 0:
            assert view.ref_logprobs is not None, "algo.kl_loss_coef > 0 needs reference scores"
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
    """Return PPO's clipped policy gradient per token."""
    return _policy_loss(cfg, partial(ppo_surrogate, cfg))


def gspo(cfg: PolicyGradientConfig) -> LossFn:
    """Return the clipped policy gradient with one ratio per sequence."""
    return _policy_loss(cfg, partial(gspo_surrogate, cfg))


def cispo(cfg: PolicyConfig) -> LossFn:
    """Return the log-likelihood loss weighted by advantage and clipped ratio."""
    return _policy_loss(cfg, partial(cispo_surrogate, cfg))


def _policy_loss(cfg: PolicyConfig, surrogate: Callable[[LossView, Tensor], Surrogate]) -> LossFn:
    kl = resolve("algo.kl_loss_type", cfg.kl_loss_type, KL_ESTIMATORS)
    correct = bind_off_policy(cfg)
    return PolicyLoss(config=cfg, surrogate=surrogate, kl=kl, correct=correct, needs_entropy=cfg.entropy_coef != 0)


def sft(cfg: AlgoConfig) -> LossFn:
    """Return the supervised loss, which reads no key of ``cfg``."""
    return SftLoss()


def clip_range(config: PolicyConfig) -> tuple[float, float]:
    """Return minimum and maximum ratio."""
    high = config.eps_clip if config.eps_clip_high is None else config.eps_clip_high
    return 1 - config.eps_clip, 1 + high


def ppo_surrogate(config: PolicyGradientConfig, view: LossView, old_logprobs_T: Tensor) -> Surrogate:
    """PPO's clipped surrogate. Source: Schulman et al. 2017, arXiv:1707.06347, equation 7."""
    return _clipped(config, _bounded(view.logprobs - old_logprobs_T), view, old_logprobs_T)


def gspo_surrogate(config: PolicyGradientConfig, view: LossView, old_logprobs_T: Tensor) -> Surrogate:
    """GSPO: the clipped surrogate with one ratio per sequence, ``(pi(y) / pi_old(y)) ** (1 / |y|)``, at each token.

    All tokens of a sequence have the same loss, so ``sequence_mean`` weights sum to one loss per sequence.
    Source: Zheng et al. 2025, Group Sequence Policy Optimization, arXiv:2507.18071, equations 5 and 7.
    """
    assert view.sequences is not None, "GSPO's ratio needs sequences"
    log_ratio_S = view.sequences.mean(view.logprobs - old_logprobs_T)
    surrogate = _clipped(config, view.sequences.spread(_bounded(log_ratio_S)), view, old_logprobs_T)
    return Surrogate(surrogate.loss, surrogate.means, {"seq_ratio_max": surrogate.means["ois"]})


def cispo_surrogate(config: PolicyConfig, view: LossView, old_logprobs_T: Tensor) -> Surrogate:
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


@dataclass(frozen=True, slots=True)
class PackedSequences:
    """``Sequences`` of one micro-batch with S sequences, N of whose tokens are on this rank.

    Under context parallelism a rank holds a part of each sequence. A sum over a sequence is then a sum over the ranks of the
    context parallel group, in the forward pass and, since each rank's loss depends on the other ranks' tokens, of the
    gradient in the backward pass: ``reduce`` does both.
    """

    index: Tensor  # I64 [N], sequence index of each token
    trained: Tensor  # bool [N], trained tokens
    num_trained: Tensor  # F [S], trained tokens of each sequence over all ranks
    reduce: Reduce  # over the ranks that share the sequences; differentiable

    def sum(self, values: Tensor) -> Tensor:
        """Return [S]: sum over the trained tokens of each sequence. Collective over the group's ranks."""
        trained_N = torch.where(self.trained, values, torch.zeros_like(values))
        zeros_S = torch.zeros(len(self.num_trained), dtype=values.dtype, device=values.device)
        return self.reduce.sum(zeros_S.index_add(0, self.index, trained_N))

    def mean(self, values: Tensor) -> Tensor:
        """Return [S]: mean over the trained tokens of each sequence, 0 without any. Collective."""
        return self.sum(values) / self.num_trained.to(values.dtype).clamp(min=1)

    def spread(self, values: Tensor) -> Tensor:
        """Return [N]: the value [S] of each token's sequence."""
        return values[self.index]
