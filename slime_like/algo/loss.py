"""Token losses bound to their config (table LOSSES). The caller multiplies by ``loss_weight`` and sums; nothing here
knows of packing, micro-batches or ranks, so none of them can change the result.

Every value stays finite at tokens that are not trained as well: infinity times a weight of 0 would be nan.
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
    """A surrogate, with off-policy corrections, KL to the reference and an entropy bonus where their keys ask for them."""

    config: PolicyConfig
    surrogate: Callable[[LossView, Tensor], Surrogate]
    kl: Callable[[Tensor, Tensor], Tensor]
    correct: OffPolicy
    needs_entropy: bool

    def __call__(self, view: LossView) -> LossOutput:
        """[T] columns -> [T] loss, with slime's metric names (``train/<name>``).

        ``old_logprobs=None`` means that this is the first update after the rollout: the ratio is 1 and only its
        gradient counts.
        """
        cfg = self.config
        old = view.logprobs.detach() if view.old_logprobs is None else view.old_logprobs
        found = self.surrogate(view, view.rollout_logprobs if cfg.use_rollout_logprobs else old)
        corrected = self.correct(cfg, old, view.rollout_logprobs, view.sequences)
        means = found.means | corrected.means
        loss = found.loss if corrected.weight is None else found.loss * corrected.weight
        if corrected.keep is not None:
            loss = loss * corrected.keep
        means["pg_loss"] = loss.detach()
        if cfg.kl_loss_coef > 0:
            assert view.ref_logprobs is not None, "algo.kl_loss_coef > 0 needs reference scores"
            kl = self.kl(view.logprobs, view.ref_logprobs)
            loss = loss + cfg.kl_loss_coef * (kl if corrected.keep is None else kl * corrected.keep)
            means["kl_loss"] = kl.detach()
        if view.entropy is not None:
            bonus = cfg.entropy_coef * view.entropy
            loss = loss - (bonus if corrected.keep is None else bonus * corrected.keep)
            means["entropy_loss"] = view.entropy.detach()
        return LossOutput(loss=loss, means=means, maxima=found.maxima)


@dataclass(slots=True)
class SftLoss:
    """Negative log-likelihood of the demonstrated tokens."""

    needs_entropy: bool = False

    def __call__(self, view: LossView) -> LossOutput:
        """[T] log-probabilities -> [T] loss."""
        loss = -view.logprobs
        return LossOutput(loss=loss, means={"sft_loss": loss.detach()}, maxima={})


def policy_gradient(cfg: PolicyGradientConfig) -> LossFn:
    """PPO's clipped policy gradient, token by token."""
    return _policy_loss(cfg, partial(per_token, cfg))


def gspo(cfg: PolicyGradientConfig) -> LossFn:
    """The clipped policy gradient with one ratio per sequence."""
    return _policy_loss(cfg, partial(per_sequence, cfg))


def cispo(cfg: PolicyConfig) -> LossFn:
    """Log-likelihood weighted by advantage and clipped ratio."""
    return _policy_loss(cfg, partial(weighted, cfg))


def _policy_loss(cfg: PolicyConfig, surrogate: Callable[[LossView, Tensor], Surrogate]) -> LossFn:
    kl = resolve("algo.kl_loss_type", cfg.kl_loss_type, KL_ESTIMATORS)
    correct: OffPolicy = resolve("algo.off_policy", cfg.off_policy, OFF_POLICY)
    return PolicyLoss(config=cfg, surrogate=surrogate, kl=kl, correct=correct, needs_entropy=cfg.entropy_coef != 0)


def sft(cfg: AlgoConfig) -> LossFn:
    """The supervised loss; it reads no key of ``cfg``."""
    return SftLoss()
