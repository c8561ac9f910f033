"""On-policy distillation: a teacher scores each token of the student's samples (table TOKEN_ADVANTAGES).

Axes of a micro-batch: T = tokens, A = trained tokens (actions).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from slime_like.algo.actions import segments
from slime_like.algo.token_advantage import whiten
from slime_like.algo_interfaces import Reduce, TokenView
from slime_like.config.schema.policy import AlgoConfig
from slime_like.config.schema.role_algo import DistillConfig
from slime_like.errors import ConfigError


class ReverseKL:
    """Token advantage ``opd_kl_coef * (log teacher - log student)``.

    The difference is a one-sample estimate of -KL(student || teacher). ``reward_coef`` times the sequence's reward is added
    and, if the config names a group advantage, the group advantage. The student's log-probabilities are ``old_logprobs`` or,
    if the ranks computed none, ``rollout_logprobs``. The constructor raises ``ConfigError`` if ``config`` is not that of
    algo=distill.
    Source: Agarwal et al. 2024, arXiv:2306.13649 (GKD); Lu et al. 2025, "On-Policy Distillation", Thinking Machines
    Lab.
    """

    def __init__(self, config: AlgoConfig) -> None:
        if not isinstance(config, DistillConfig):
            raise ConfigError(
                f"algo.token_advantage='distill' needs a teacher; algo is {config.name!r}: set algo=distill"
            )
        self._config = config

    def __call__(self, views: Sequence[TokenView], reduce: Reduce) -> list[Tensor]:
        """Return the advantages F32 [T] for each view, 0 at untrained tokens.

        If ``algo.normalize_advantages`` is set, this is a collective that whitens them over all ranks.
        """
        advantages_T = [self._advantages(view) for view in views]
        if not self._config.normalize_advantages:
            return advantages_T
        return whiten(advantages_T, [view.loss_weight > 0 for view in views], reduce)

    def diagnose(self, views: Sequence[TokenView], reduce: Reduce) -> dict[str, float]:
        """Return ``teacher_kl``: the mean of log student - log teacher over the trained tokens of all ranks.

        Without ``views``, return an empty dict; either every rank has views or none has. With views, this is a collective
        over the data-parallel ranks.
        """
        gaps_of_views = [(_student(view) - _teacher(view))[view.loss_weight > 0].double() for view in views]
        if not gaps_of_views:
            return {}
        gaps_A = torch.cat(gaps_of_views)
        total, num_actions = reduce.sum(torch.stack([gaps_A.sum(), gaps_A.new_tensor(float(len(gaps_A)))])).tolist()
        return {"teacher_kl": total / max(num_actions, 1.0)}

    def _advantages(self, view: TokenView) -> Tensor:
        cfg = self._config
        mask_T = view.loss_weight > 0
        segment_A = segments(view)
        advantages_A = cfg.opd_kl_coef * (_teacher(view) - _student(view))[mask_T]
        if cfg.reward_coef:
            advantages_A = advantages_A + cfg.reward_coef * view.rewards[segment_A]
        if view.advantages is not None:
            advantages_A = advantages_A + view.advantages[segment_A]
        advantages_T = torch.zeros_like(view.loss_weight, dtype=advantages_A.dtype)
        advantages_T[mask_T] = advantages_A
        return advantages_T


def _student(view: TokenView) -> Tensor:
    """Return [T]: the student's log-probabilities."""
    return view.rollout_logprobs if view.old_logprobs is None else view.old_logprobs


def _teacher(view: TokenView) -> Tensor:
    """Return [T]: the teacher's log-probabilities."""
    assert view.teacher_logprobs is not None, "the teacher has not scored this micro-batch"
    return view.teacher_logprobs
