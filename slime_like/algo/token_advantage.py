"""Advantages per token, computed on the ranks before the first optimizer step (table TOKEN_ADVANTAGES).

Axes: T = tokens of a micro-batch, A = trained tokens (actions) of a micro-batch, S = sequences of a micro-batch.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from slime_like.algo.actions import segments, sequences, token_rewards
from slime_like.config.schema.algo import ReinforcePlusPlusBaselineConfig, ReinforcePlusPlusConfig
from slime_like.config.schema.names import KL_ESTIMATORS
from slime_like.config.schema.policy import AlgoConfig
from slime_like.errors import ConfigError
from slime_like.interfaces import Reduce, TokenView
from slime_like.registry import resolve

MIN_VARIANCE = 1e-8  # a batch in which all returns are equal whitens to zeros, not to noise


class ReinforcePlusPlus:
    """REINFORCE++: discounted return per trained token, whitened over the whole batch.

    The reward of a sequence stands at its last trained token; ``kl_coef * KL(old || ref)`` is taken off at each trained
    token. Tokens that the model did not write are no actions: they carry no reward and do not discount.
    Source: Hu et al. 2025, REINFORCE++, arXiv:2501.03262; whitening as in its reference implementation (OpenRLHF).
    """

    def __init__(self, config: AlgoConfig) -> None:
        if not isinstance(config, ReinforcePlusPlusConfig):
            raise ConfigError(
                f"algo.token_advantage='reinforce_pp' needs the keys of algo=reinforce_pp, and algo is {config.name!r}"
            )
        self._gamma = config.gamma
        self._kl_coef = config.kl_coef
        self._kl = resolve("algo.kl_reward_type", config.kl_reward_type, KL_ESTIMATORS)

    @property
    def required_scores(self) -> frozenset[str]:
        """Columns of ``TokenView`` that must be filled before the call."""
        return frozenset({"old_logprobs", "ref_logprobs"}) if self._kl_coef > 0 else frozenset()

    def __call__(self, views: Sequence[TokenView], reduce: Reduce) -> list[Tensor]:
        """F32 [T] per view, 0 where not trained. Mean 0 and variance 1 over the trained tokens of all ranks."""
        returns = [self._returns(view) for view in views]
        masks = [view.loss_weight > 0 for view in views]
        return whiten(returns, masks, reduce)

    def _returns(self, view: TokenView) -> Tensor:
        """[T] discounted sum of the rewards at and after each trained token of its sequence."""
        mask_T = view.loss_weight > 0
        segment_A = segments(view)
        rewards_A = token_rewards(view, segment_A, self._kl_coef, self._kl)
        returns_T = torch.zeros_like(view.loss_weight, dtype=rewards_A.dtype)
        returns_T[mask_T] = discounted_returns(rewards_A, segment_A, self._gamma)
        return returns_T


class ReinforcePlusPlusBaseline:
    """REINFORCE++-baseline: the group advantage at each trained token, less ``kl_coef * KL(old || ref)``, whitened over
    the whole batch.

    Source: Hu et al. 2025, REINFORCE++, arXiv:2501.03262, section 3.2.
    """

    def __init__(self, config: AlgoConfig) -> None:
        if not isinstance(config, ReinforcePlusPlusBaselineConfig):
            raise ConfigError(
                "algo.token_advantage='reinforce_pp_baseline' needs the keys of algo=reinforce_pp_baseline, "
                f"and algo is {config.name!r}"
            )
        self._kl_coef = config.kl_coef
        self._kl = resolve("algo.kl_reward_type", config.kl_reward_type, KL_ESTIMATORS)

    @property
    def required_scores(self) -> frozenset[str]:
        """Columns of ``TokenView`` that must be filled before the call."""
        return frozenset({"old_logprobs", "ref_logprobs"}) if self._kl_coef > 0 else frozenset()

    def __call__(self, views: Sequence[TokenView], reduce: Reduce) -> list[Tensor]:
        """F32 [T] per view, 0 where not trained. Mean 0 and variance 1 over the trained tokens of all ranks."""
        masks = [view.loss_weight > 0 for view in views]
        return whiten([self._advantages(view) for view in views], masks, reduce)

    def _advantages(self, view: TokenView) -> Tensor:
        assert view.advantages is not None, "group advantages come with the rows"
        spread_T = view.advantages[sequences(view)]
        if self._kl_coef == 0:
            return spread_T
        assert view.old_logprobs is not None and view.ref_logprobs is not None, "old and ref scores are not annotated"
        return spread_T - self._kl_coef * self._kl(view.old_logprobs, view.ref_logprobs)


def discounted_returns(rewards_A: Tensor, segment_A: Tensor, gamma: float) -> Tensor:
    """[A] ``sum_k gamma^k * reward[a + k]`` within each segment.

    A doubling scan (Hillis and Steele 1986): after the step of stride s each entry holds the discounted sum of the
    next 2s rewards, so log2 of the longest segment passes do. Unlike differences of one cumulative sum over the row it
    neither under- nor overflows for small gamma nor lets one sequence's size disturb another's digits.
    """
    returns_A = rewards_A.clone()
    stride = 1
    while stride < len(returns_A):
        same_A = segment_A[stride:] == segment_A[:-stride]
        if not bool(same_A.any()):
            break
        later_A = torch.where(same_A, returns_A[stride:], torch.zeros_like(returns_A[stride:]))
        returns_A = torch.cat([returns_A[:-stride] + gamma**stride * later_A, returns_A[-stride:]])
        stride *= 2
    return returns_A


def whiten(values: Sequence[Tensor], masks: Sequence[Tensor], reduce: Reduce) -> list[Tensor]:
    """Shift and scale all masked entries of all ranks to mean 0 and variance 1 (biased); 0 where not masked.

    Two passes in float64: the deviations are squared after the global mean is known, so that a large common offset
    does not cancel. Every rank makes the same two reductions, also one whose views hold no trained token.
    """
    device = values[0].device if values else None
    masked = [value[mask].double() for value, mask in zip(values, masks, strict=True)]
    flat = torch.cat(masked) if masked else torch.zeros(0, dtype=torch.float64)
    local_count = torch.tensor(float(len(flat)), dtype=torch.float64, device=device)
    count_sum = reduce.sum(torch.stack([local_count, flat.sum()]))
    count = count_sum[0].clamp(min=1.0)
    mean = count_sum[1] / count
    variance = reduce.sum((flat - mean).square().sum()) / count
    scale = variance.clamp(min=MIN_VARIANCE).rsqrt()
    whitened: list[Tensor] = []
    for value, mask in zip(values, masks, strict=True):
        normed = ((value.double() - mean) * scale).to(value.dtype)
        whitened.append(torch.where(mask, normed, torch.zeros_like(normed)))
    return whitened
