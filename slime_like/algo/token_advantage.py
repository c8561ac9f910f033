"""Token advantages, computed on the trainer ranks before a rollout's first optimizer step (table TOKEN_ADVANTAGES).

Axes of a micro-batch: T = tokens, A = trained tokens (actions), S = sequences.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from slime_like.algo.actions import segments, sequences, token_rewards
from slime_like.algo_interfaces import Reduce, TokenView
from slime_like.config.schema.algo import ReinforcePlusPlusBaselineConfig, ReinforcePlusPlusConfig
from slime_like.config.schema.names import KL_ESTIMATORS
from slime_like.config.schema.policy import AlgoConfig
from slime_like.errors import ConfigError
from slime_like.registry import resolve

MIN_VARIANCE = 1e-8  # below it whitening would scale up rounding errors of equal values


class ReinforcePlusPlus:
    """REINFORCE++: discounted return per trained token, whitened over the batch.

    The last trained token of a sequence gets the sequence's reward, and each trained token the penalty
    ``-kl_coef * KL(old || ref)``. Tokens that the model did not sample have no reward, and the discount skips them. The
    constructor raises ``ConfigError`` if ``config`` is not that of algo=reinforce_pp.
    Source: Hu et al. 2025, REINFORCE++, arXiv:2501.03262; whitening as in its reference implementation (OpenRLHF).
    """

    def __init__(self, config: AlgoConfig) -> None:
        if not isinstance(config, ReinforcePlusPlusConfig):
            raise ConfigError(
                f"algo.token_advantage='reinforce_pp' needs the keys of algo=reinforce_pp; algo is {config.name!r}: "
                "set algo=reinforce_pp"
            )
        self._gamma = config.gamma
        self._kl_coef = config.kl_coef
        self._kl = resolve("algo.kl_reward_type", config.kl_reward_type, KL_ESTIMATORS)

    def __call__(self, views: Sequence[TokenView], reduce: Reduce) -> list[Tensor]:
        """Return the advantages F32 [T] for each view, 0 at untrained tokens.

        This is a collective that whitens them over the trained tokens of all ranks.
        """
        returns_T = [self._returns(view) for view in views]
        masks_T = [view.loss_weight > 0 for view in views]
        return whiten(returns_T, masks_T, reduce)

    def _returns(self, view: TokenView) -> Tensor:
        """Return [T]: the discounted sum of a trained token's reward and the sequence's later rewards; 0 at other tokens."""
        mask_T = view.loss_weight > 0
        segment_A = segments(view)
        rewards_A = token_rewards(view, segment_A, self._kl_coef, self._kl)
        returns_T = torch.zeros_like(view.loss_weight, dtype=rewards_A.dtype)
        returns_T[mask_T] = discounted_returns(rewards_A, segment_A, self._gamma)
        return returns_T


class ReinforcePlusPlusBaseline:
    """REINFORCE++-baseline: group advantage minus ``kl_coef * KL(old || ref)`` per trained token, whitened.

    The constructor raises ``ConfigError`` if ``config`` is not that of algo=reinforce_pp_baseline.

    Source: Hu et al. 2025, REINFORCE++, arXiv:2501.03262, section 3.2.
    """

    def __init__(self, config: AlgoConfig) -> None:
        if not isinstance(config, ReinforcePlusPlusBaselineConfig):
            raise ConfigError(
                "algo.token_advantage='reinforce_pp_baseline' needs the keys of algo=reinforce_pp_baseline; "
                f"algo is {config.name!r}: set algo=reinforce_pp_baseline"
            )
        self._kl_coef = config.kl_coef
        self._kl = resolve("algo.kl_reward_type", config.kl_reward_type, KL_ESTIMATORS)

    def __call__(self, views: Sequence[TokenView], reduce: Reduce) -> list[Tensor]:
        """Return the advantages F32 [T] for each view, 0 at untrained tokens.

        This is a collective that whitens them over the trained tokens of all ranks.
        """
        masks_T = [view.loss_weight > 0 for view in views]
        return whiten([self._advantages(view) for view in views], masks_T, reduce)

    def _advantages(self, view: TokenView) -> Tensor:
        assert view.advantages is not None, "algo.group_advantage computes no group advantages"
        advantages_T = view.advantages[sequences(view)]
        if self._kl_coef == 0:
            return advantages_T
        assert view.old_logprobs is not None and view.ref_logprobs is not None, (
            "kl_coef > 0 needs old and reference log-probabilities"
        )
        return advantages_T - self._kl_coef * self._kl(view.old_logprobs, view.ref_logprobs)


def discounted_returns(rewards_A: Tensor, segment_A: Tensor, gamma: float) -> Tensor:
    """Return [A]: ``sum_k gamma^k * reward[a + k]`` within each segment.

    A doubling scan (Hillis and Steele 1986): after the pass with stride s, each entry holds the discounted sum of 2s rewards,
    from its own onwards, so log2(longest segment) passes, rounded up, suffice. Subtracting two cumulative sums instead would
    under- or overflow for small gamma, and lose precision in sequences that follow large values.
    """
    returns_A = rewards_A.clone()
    stride = 1
    while stride < len(returns_A):
        same_segment_A = segment_A[stride:] == segment_A[:-stride]
        if not bool(same_segment_A.any()):
            break
        later_A = torch.where(same_segment_A, returns_A[stride:], torch.zeros_like(returns_A[stride:]))
        returns_A = torch.cat([returns_A[:-stride] + gamma**stride * later_A, returns_A[-stride:]])
        stride *= 2
    return returns_A


def whiten(values_T: Sequence[Tensor], masks_T: Sequence[Tensor], reduce: Reduce) -> list[Tensor]:
    """Return [T] for each of ``values_T``: entries with mask True shifted and scaled to mean 0 and variance 1, others 0.

    Mean and (biased) variance are over all ranks, in float64; a variance below ``MIN_VARIANCE`` is raised to it. The
    variance is computed from deviations from the mean, so that a large common offset costs no precision. This is a
    collective: every rank makes the same two reductions, even if it has no trained tokens.
    """
    device = values_T[0].device if values_T else None
    parts_A = [value_T[mask_T].double() for value_T, mask_T in zip(values_T, masks_T, strict=True)]
    values_A = torch.cat(parts_A) if parts_A else torch.zeros(0, dtype=torch.float64)
    num_local = torch.tensor(float(len(values_A)), dtype=torch.float64, device=device)
    totals_2 = reduce.sum(torch.stack([num_local, values_A.sum()]))
    num_actions = totals_2[0].clamp(min=1.0)
    mean = totals_2[1] / num_actions
    variance = reduce.sum((values_A - mean).square().sum()) / num_actions
    scale = variance.clamp(min=MIN_VARIANCE).rsqrt()
    whitened: list[Tensor] = []
    for value_T, mask_T in zip(values_T, masks_T, strict=True):
        normed_T = ((value_T.double() - mean) * scale).to(value_T.dtype)
        whitened.append(torch.where(mask_T, normed_T, torch.zeros_like(normed_T)))
    return whitened
