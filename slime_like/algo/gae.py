"""Generalised advantage estimation, for PPO with a critic (table TOKEN_ADVANTAGES).

Axes of a micro-batch: T = tokens, A = trained tokens (actions). A digit in a name is the length of an axis: ``both_2A`` is
[2, A].
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from slime_like.algo.actions import is_last_action, segments, token_rewards
from slime_like.algo.token_advantage import discounted_returns, whiten
from slime_like.algo_interfaces import Reduce, TokenView
from slime_like.config.schema.names import KL_ESTIMATORS
from slime_like.config.schema.policy import AlgoConfig
from slime_like.config.schema.role_algo import PpoConfig
from slime_like.errors import ConfigError
from slime_like.registry import resolve

MIN_VARIANCE = 1e-12  # returns with a smaller variance count as constant: the explained variance is 0


class GeneralisedAdvantage:
    """GAE: ``sum_k (gamma * lambd)^k * delta[a + k]`` with ``delta[a] = reward[a] + gamma * value[a + 1] - value[a]``.

    ``a`` indexes the trained tokens of a sequence, so the discount skips tokens that the model did not sample.
    The value after the last action is 0, even for truncated episodes. Rewards come from ``actions.token_rewards``.
    The constructor raises ``ConfigError`` if ``config`` is not that of algo=ppo.
    Source: Schulman et al. 2016, arXiv:1506.02438, equation 16.
    """

    def __init__(self, config: AlgoConfig) -> None:
        if not isinstance(config, PpoConfig):
            raise ConfigError(f"algo.token_advantage='gae' needs a critic; algo is {config.name!r}: set algo=ppo")
        self._config = config
        self._kl = resolve("algo.kl_reward_type", config.kl_reward_type, KL_ESTIMATORS)

    def __call__(self, views: Sequence[TokenView], reduce: Reduce) -> list[Tensor]:
        """Return the advantages F32 [T] for each view, 0 at untrained tokens.

        If ``algo.normalize_advantages`` is set, this is a collective that whitens them over all ranks.
        """
        advantages_T = [self._advantages(view) for view in views]
        if not self._config.normalize_advantages:
            return advantages_T
        return whiten(advantages_T, [view.loss_weight > 0 for view in views], reduce)

    def returns(self, views: Sequence[TokenView]) -> list[Tensor]:
        """Return the critic's targets, F32 [T] for each view: advantage before whitening plus value, 0 at untrained tokens."""
        return [self._advantages(view) + torch.where(view.loss_weight > 0, _values(view), 0.0) for view in views]

    def diagnose(self, views: Sequence[TokenView], reduce: Reduce) -> dict[str, float]:
        """Return ``explained_variance``: 1 - Var(return - value) / Var(return) over the trained tokens of all ranks.

        The metric is 0 if Var(return) is negligible. Without ``views``, return an empty dict; either every rank has views or
        none has. With views, this is a collective over the data-parallel ranks.
        """
        pairs_2A = [
            torch.stack([returns_T, returns_T - _values(view)])[:, view.loss_weight > 0].double()
            for returns_T, view in zip(self.returns(views), views, strict=True)
        ]
        if not pairs_2A:
            return {}
        both_2A = torch.cat(pairs_2A, 1)
        num_local_1 = both_2A.new_tensor([float(both_2A.shape[1])])
        totals_3 = reduce.sum(torch.cat([num_local_1, both_2A.sum(1)]))
        num_actions = totals_3[0].clamp(min=1.0)
        mean_2 = totals_3[1:] / num_actions
        variance, residual = (reduce.sum((both_2A - mean_2[:, None]).square().sum(1)) / num_actions).tolist()
        return {"explained_variance": 1.0 - residual / variance if variance > MIN_VARIANCE else 0.0}

    def _advantages(self, view: TokenView) -> Tensor:
        cfg = self._config
        mask_T = view.loss_weight > 0
        segment_A = segments(view)
        values_A = _values(view)[mask_T]
        rewards_A = token_rewards(view, segment_A, cfg.kl_coef, self._kl).to(values_A.dtype)
        next_values_A = torch.where(is_last_action(segment_A), torch.zeros_like(values_A), values_A.roll(-1))
        deltas_A = rewards_A + cfg.gamma * next_values_A - values_A
        advantages_T = torch.zeros_like(view.loss_weight, dtype=values_A.dtype)
        advantages_T[mask_T] = discounted_returns(deltas_A, segment_A, cfg.gamma * cfg.lambd)
        return advantages_T


def _values(view: TokenView) -> Tensor:
    assert view.values is not None, "the critic has not computed the values of this micro-batch"
    return view.values
