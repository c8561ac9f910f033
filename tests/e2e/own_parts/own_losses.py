"""A user's loss, token advantage, correction and KL estimator. They run on trainer ranks; the driver constructs the first two."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from own_algo import OwnAlgoConfig
from own_record import record
from torch import Tensor

from slime_like.algo.loss import k2, policy_gradient
from slime_like.algo.off_policy import Correction, importance_correction
from slime_like.algo.token_advantage import ReinforcePlusPlusBaseline
from slime_like.algo_interfaces import LossFn, LossOutput, LossView, Reduce, Sequences, TokenView

LOSS_METRIC = 5.0
MIN_KL = 0.25


@dataclass(slots=True)
class OwnLoss:
    """The clipped policy gradient with one more metric."""

    loss: LossFn
    needs_entropy: bool

    def __call__(self, view: LossView) -> LossOutput:
        record("loss")
        output = self.loss(view)
        return replace(output, means={**output.means, "own_loss": torch.full_like(view.logprobs, LOSS_METRIC).detach()})


def own_loss(config: OwnAlgoConfig) -> OwnLoss:
    """Return the loss."""
    loss = policy_gradient(config)
    return OwnLoss(loss, loss.needs_entropy)


class OwnTokenAdvantage(ReinforcePlusPlusBaseline):
    """REINFORCE++-baseline with the largest group advantage of a rank as a metric."""

    def __call__(self, views: Sequence[TokenView], reduce: Reduce) -> list[Tensor]:
        record("token advantage")
        return super().__call__(views, reduce)

    def diagnose(self, views: Sequence[TokenView], reduce: Reduce) -> Mapping[str, float]:
        """Return the largest group advantage of the rank's sequences."""
        del reduce
        group_advantages = [view.advantages for view in views if view.advantages is not None]
        return {"own_group_advantage": max(float(advantages_S.max()) for advantages_S in group_advantages)}


def own_correction(
    config: OwnAlgoConfig, old_logprobs_T: Tensor, rollout_logprobs_T: Tensor, sequences: Sequences | None
) -> Correction:
    """Return the algorithm's ``own_weight`` for every token, also as a metric."""
    record("off-policy correction")
    correction = importance_correction(config, old_logprobs_T, rollout_logprobs_T, sequences)
    weight_T = torch.full_like(old_logprobs_T, config.own_weight)
    return replace(correction, weight=weight_T, means={**correction.means, "own_weight": weight_T})


def own_kl(logprobs_T: Tensor, ref_logprobs_T: Tensor) -> Tensor:
    """Return k2 plus ``MIN_KL``."""
    record("KL estimator")
    return k2(logprobs_T, ref_logprobs_T) + MIN_KL
