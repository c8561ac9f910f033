"""Token losses bound to their config (table LOSSES). The caller multiplies by ``loss_weight`` and sums; nothing here
knows of packing, micro-batches or ranks, so none of them can change the result.

Every value stays finite at tokens that are not trained as well: infinity times a weight of 0 would be nan.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from slime_like.algo.kl import MAX_LOG_RATIO
from slime_like.algo.off_policy import truncated_importance
from slime_like.config.algo import AlgoConfig, PolicyGradientConfig
from slime_like.config.names import KL_ESTIMATORS
from slime_like.interfaces import LossFn, LossOutput, LossView
from slime_like.registry import resolve


@dataclass(slots=True)
class PolicyGradientLoss:
    """PPO's clipped surrogate, with TIS, KL to the reference and an entropy bonus where their keys ask for them."""

    config: PolicyGradientConfig
    kl: Callable[[Tensor, Tensor], Tensor]
    needs_entropy: bool

    def __call__(self, view: LossView) -> LossOutput:
        """[T] columns -> [T] loss, with slime's metric names (``train/<name>``).

        ``old_logprobs=None`` means that this is the first update after the rollout: the ratio is 1 and only its
        gradient counts.
        """
        cfg = self.config
        assert view.advantages is not None, "a policy gradient needs advantages"
        old = view.logprobs.detach() if view.old_logprobs is None else view.old_logprobs
        loss, means = self._surrogate(view.logprobs, old, view.advantages)
        if cfg.use_tis:
            tis = truncated_importance(old, view.rollout_logprobs, cfg.tis_clip)
            loss = loss * tis.weight
            means["tis"] = tis.raw
            means["tis_abs"] = (tis.raw - 1).abs()
            means["tis_clipfrac"] = (tis.raw > cfg.tis_clip).to(loss.dtype)
        means["pg_loss"] = loss.detach()
        if cfg.kl_loss_coef > 0:
            assert view.ref_logprobs is not None, "algo.kl_loss_coef > 0 needs reference scores"
            kl = self.kl(view.logprobs, view.ref_logprobs)
            loss = loss + cfg.kl_loss_coef * kl
            means["kl_loss"] = kl.detach()
        if view.entropy is not None:
            loss = loss - cfg.entropy_coef * view.entropy
            means["entropy_loss"] = view.entropy.detach()
        drift = (old - view.rollout_logprobs).abs()
        means["train_rollout_logprob_abs_diff"] = drift
        return LossOutput(loss=loss, means=means, maxima={"train_rollout_logprob_abs_diff_max": drift})

    def _surrogate(self, logprobs: Tensor, old: Tensor, advantages: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        """Pessimistic one of the plain and the clipped objective. Source: Schulman et al. 2017, arXiv:1707.06347."""
        cfg = self.config
        high = cfg.eps_clip if cfg.eps_clip_high is None else cfg.eps_clip_high
        log_ratio = (logprobs - old).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
        ratio = log_ratio.exp()
        plain = -ratio * advantages
        clipped = -ratio.clamp(1 - cfg.eps_clip, 1 + high) * advantages
        loss = torch.maximum(plain, clipped)
        means = {
            "pg_clipfrac": (clipped > plain).to(loss.dtype),
            "ppo_kl": (old - logprobs).detach(),
            "ois": ratio.detach(),
        }
        return loss, means


@dataclass(slots=True)
class SftLoss:
    """Negative log-likelihood of the demonstrated tokens."""

    needs_entropy: bool = False

    def __call__(self, view: LossView) -> LossOutput:
        """[T] log-probabilities -> [T] loss."""
        loss = -view.logprobs
        return LossOutput(loss=loss, means={"sft_loss": loss.detach()}, maxima={})


def policy_gradient(cfg: PolicyGradientConfig) -> LossFn:
    """The clipped policy-gradient loss under ``cfg``."""
    kl = resolve("algo.kl_loss_type", cfg.kl_loss_type, KL_ESTIMATORS)
    return PolicyGradientLoss(config=cfg, kl=kl, needs_entropy=cfg.entropy_coef != 0)


def sft(cfg: AlgoConfig) -> LossFn:
    """The supervised loss; it reads no key of ``cfg``."""
    return SftLoss()
