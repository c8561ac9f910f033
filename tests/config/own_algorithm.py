"""A user's own loss, advantages and correction, in the shape of ``slime_like.interfaces``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from slime_like.algo.off_policy import Correction
from slime_like.config.schema.policy import AlgoConfig, PolicyConfig
from slime_like.interfaces import LossOutput, LossView, Reduce, Sequences, TokenView
from slime_like.types import F32


@dataclass(slots=True)
class Reinforce:
    """Plain REINFORCE: no ratio, no clipping."""

    config: AlgoConfig
    needs_entropy: bool = False

    def __call__(self, view: LossView) -> LossOutput:
        assert view.advantages is not None
        loss = -view.advantages * view.logprobs
        return LossOutput(loss, means={"reinforce_loss": loss.detach()}, maxima={})


def centred(rewards_G: F32) -> F32:
    """Half the distance to the group's mean."""
    return ((rewards_G - rewards_G.mean()) / 2).astype(np.float32)


@dataclass(slots=True)
class ConstantAdvantage:
    """The sequence's reward at each of its trained tokens, less 0.5."""

    config: AlgoConfig

    def __call__(self, views: Sequence[TokenView], reduce: Reduce) -> list[Tensor]:
        lengths = [view.cu_seqlens.diff() for view in views]
        spread = [view.rewards.repeat_interleave(num) for view, num in zip(views, lengths, strict=True)]
        return [(value - 0.5) * (view.loss_weight > 0) for value, view in zip(spread, views, strict=True)]


def halved(config: PolicyConfig, old: Tensor, rollout: Tensor, sequences: Sequences | None) -> Correction:
    """Half the weight for every token."""
    return Correction(weight=torch.full_like(old, 0.5), keep=None, means={})


def two_arguments(config: AlgoConfig, view: LossView) -> None:
    """A loss that is not bound to its config first."""


def returns_nothing(config: AlgoConfig) -> None:
    """A loss or advantage that binds to nothing."""


def without_entropy(config: AlgoConfig) -> object:
    """A loss that does not say whether it reads entropy."""
    return lambda view: view


def fails(config: AlgoConfig) -> None:
    """A loss that cannot be constructed."""
    raise ValueError("no such setting")


def one_number(rewards_G: F32) -> F32:
    """An advantage for the whole group."""
    return rewards_G.mean(keepdims=True)
