"""On-policy distillation: a teacher scores each token of the student's samples (table TOKEN_ADVANTAGES).

Axes: T = tokens of a micro-batch, A = trained tokens (actions) of a micro-batch.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from slime_like.algo.actions import segments
from slime_like.algo.token_advantage import whiten
from slime_like.config.schema.policy import AlgoConfig
from slime_like.config.schema.role_algo import DistillConfig
from slime_like.errors import ConfigError
from slime_like.interfaces import Reduce, TokenView


class ReverseKL:
    """Token advantage ``opd_kl_coef * (log teacher - log student)``: a one-sample estimate of -KL(student || teacher).

    If configured, ``reward_coef`` times the sequence's reward and the group's advantage are added. The student's
    log-probabilities are the old ones if computed, else the rollout's, which come from the same weights.
    Source: Agarwal et al. 2024, arXiv:2306.13649 (GKD); Lu et al. 2025, "On-Policy Distillation", Thinking Machines Lab.
    """

    def __init__(self, config: AlgoConfig) -> None:
        if not isinstance(config, DistillConfig):
            raise ConfigError(
                f"algo.token_advantage='distill' needs a teacher, as algo=distill has; algo is {config.name!r}"
            )
        self._config = config

    def __call__(self, views: Sequence[TokenView], reduce: Reduce) -> list[Tensor]:
        """Return F32 [T] per view, 0 at untrained tokens."""
        advantages_T = [self._advantages(view) for view in views]
        if not self._config.normalize_advantages:
            return advantages_T
        return whiten(advantages_T, [view.loss_weight > 0 for view in views], reduce)

    def diagnose(self, views: Sequence[TokenView], reduce: Reduce) -> dict[str, float]:
        """Return ``teacher_kl``: mean of log student - log teacher over the trained tokens of all ranks."""
        parts_A = [(_student(view) - _teacher(view))[view.loss_weight > 0].double() for view in views]
        if not parts_A:
            return {}
        gaps_A = torch.cat(parts_A)
        total, count = reduce.sum(torch.stack([gaps_A.sum(), gaps_A.new_tensor(float(len(gaps_A)))])).tolist()
        return {"teacher_kl": total / max(count, 1.0)}

    def _advantages(self, view: TokenView) -> Tensor:
        cfg = self._config
        mask_T = view.loss_weight > 0
        segment_A = segments(view)
        sum_A = cfg.opd_kl_coef * (_teacher(view) - _student(view))[mask_T]
        if cfg.reward_coef:
            sum_A = sum_A + cfg.reward_coef * view.rewards[segment_A]
        if view.advantages is not None:
            sum_A = sum_A + view.advantages[segment_A]
        advantages_T = torch.zeros_like(view.loss_weight, dtype=sum_A.dtype)
        advantages_T[mask_T] = sum_A
        return advantages_T


def _student(view: TokenView) -> Tensor:
    return view.rollout_logprobs if view.old_logprobs is None else view.old_logprobs


def _teacher(view: TokenView) -> Tensor:
    assert view.teacher_logprobs is not None, "the teacher has not scored these rows"
    return view.teacher_logprobs
