"""Actions: the trained tokens of a micro-batch, in order.

Axes: T = tokens, S = sequences, A = actions.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from slime_like.algo_interfaces import TokenView


def sequences(view: TokenView) -> Tensor:
    """Return [T]: the sequence index of each token, ascending."""
    lengths_S = view.cu_seqlens.diff().long()
    return torch.repeat_interleave(torch.arange(len(lengths_S), device=lengths_S.device), lengths_S)


def segments(view: TokenView) -> Tensor:
    """Return [A]: the sequence index of each action, ascending."""
    return sequences(view)[view.loss_weight > 0]


def is_last_action(segment_A: Tensor) -> Tensor:
    """Return [A]: True at the last action of each sequence."""
    last_A = torch.ones_like(segment_A, dtype=torch.bool)
    last_A[:-1] = segment_A[1:] != segment_A[:-1]
    return last_A


def token_rewards(view: TokenView, segment_A: Tensor, kl_coef: float, kl: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
    """Return [A]: the reward of the sequence at its last action, minus ``kl_coef * KL(old || ref)`` at each action."""
    rewards_A = view.rewards[segment_A] * is_last_action(segment_A)
    if kl_coef > 0:
        assert view.old_logprobs is not None and view.ref_logprobs is not None, (
            "kl_coef > 0 needs old and reference log-probabilities"
        )
        mask_T = view.loss_weight > 0
        rewards_A = rewards_A - kl_coef * kl(view.old_logprobs[mask_T], view.ref_logprobs[mask_T])
    return rewards_A
