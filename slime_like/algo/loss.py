"""Token losses bound to their config (table LOSSES). The caller multiplies by ``loss_weight`` and sums; losses
do not depend on packing, micro-batches or ranks.

Values are finite also at untrained tokens: infinity times a weight of 0 would be nan. Axis: T = tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from torch import Tensor

from slime_like.algo.off_policy import OffPolicy
from slime_like.algo.surrogate import Surrogate, per_sequence, per_token, weighted
from slime_like.config.schema.names import KL_ESTIMATORS, OFF_POLICY
from slime_like.config.schema.policy import AlgoConfig, PolicyConfig, PolicyGradientConfig
from slime_like.interfaces import LossFn, LossOutput, LossView
from slime_like.registry import resolve


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
    return _policy_loss(cfg, partial(per_token, cfg))


def gspo(cfg: PolicyGradientConfig) -> LossFn:
    """Return the clipped policy gradient with one ratio per sequence."""
    return _policy_loss(cfg, partial(per_sequence, cfg))


def cispo(cfg: PolicyConfig) -> LossFn:
    """Return the log-likelihood loss weighted by advantage and clipped ratio."""
    return _policy_loss(cfg, partial(weighted, cfg))


def _policy_loss(cfg: PolicyConfig, surrogate: Callable[[LossView, Tensor], Surrogate]) -> LossFn:
    kl = resolve("algo.kl_loss_type", cfg.kl_loss_type, KL_ESTIMATORS)
    correct: OffPolicy = resolve("algo.off_policy", cfg.off_policy, OFF_POLICY)
    return PolicyLoss(config=cfg, surrogate=surrogate, kl=kl, correct=correct, needs_entropy=cfg.entropy_coef != 0)


def sft(cfg: AlgoConfig) -> LossFn:
    """Return the supervised loss, which reads no key of ``cfg``."""
    return SftLoss()
