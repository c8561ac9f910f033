"""User-defined loss, advantages and off-policy correction with the signatures of ``slime_like.interfaces``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor

from slime_like.algo.off_policy import Correction
from slime_like.algo_interfaces import LossOutput, LossView, Reduce, Sequences, TokenView
from slime_like.config.schema.policy import AlgoConfig, PolicyConfig
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
    """Return half the distance to the group's mean."""
    return ((rewards_G - rewards_G.mean()) / 2).astype(np.float32)


@dataclass(slots=True)
class ConstantAdvantage:
    """Token advantage: the sequence's reward minus 0.5 at each trained token."""

    config: AlgoConfig

    def __call__(self, views: Sequence[TokenView], reduce: Reduce) -> list[Tensor]:
        lengths = [view.cu_seqlens.diff() for view in views]
        spread = [view.rewards.repeat_interleave(num) for view, num in zip(views, lengths, strict=True)]
        return [(value - 0.5) * (view.loss_weight > 0) for value, view in zip(spread, views, strict=True)]


def halved(config: PolicyConfig, old: Tensor, rollout: Tensor, sequences: Sequences | None) -> Correction:
    """Return a correction with weight 0.5 for every token."""
    return Correction(weight=torch.full_like(old, 0.5), keep=None, means={})


def broken(config: PolicyConfig, old: Tensor, rollout: Tensor, sequences: Sequences | None) -> Correction:
    """A correction that raises."""
    raise ValueError("no ratio")


def unweighted(config: PolicyConfig, old: Tensor, rollout: Tensor, sequences: Sequences | None) -> Tensor:
    """A correction that returns the bare weight."""
    return torch.ones_like(old)


def one_weight(config: PolicyConfig, old: Tensor, rollout: Tensor, sequences: Sequences | None) -> Correction:
    """A correction with one weight for all tokens."""
    return Correction(weight=torch.tensor(0.5), keep=None, means={})


def number(config: PolicyConfig, old: Tensor, rollout: Tensor, sequences: Sequences | None) -> Correction:
    """Return a correction whose weight is not a tensor."""
    return Correction(weight=cast(Any, 0.5), keep=None, means={})


@dataclass(slots=True)
class CriticAdvantage(ConstantAdvantage):
    """A token advantage that can also compute targets, but only from a critic's values."""

    def returns(self, views: Sequence[TokenView]) -> list[Tensor]:
        columns: list[Tensor] = []
        for view in views:
            assert view.values is not None, "there is no critic"
            columns.append(view.values)
        return columns


@dataclass(slots=True)
class BrokenReturns(ConstantAdvantage):
    """A token advantage whose critic targets and diagnostics raise."""

    def returns(self, views: Sequence[TokenView]) -> list[Tensor]:
        raise ValueError("no targets")

    def diagnose(self, views: Sequence[TokenView], reduce: Reduce) -> dict[str, float]:
        raise ValueError("no numbers")


def slime_loss(args: object, batch: object, logits: object, sum_of_sample_mean: object) -> None:
    """A loss with slime's signature."""


def slime_advantages(args: object, rollout_data: object) -> None:
    """Advantages with slime's signature."""


def slime_tis(args: object, *, pg_loss: object, train_log_probs: object, **kwargs: object) -> None:
    """Importance weights with slime's signature."""


def two_arguments(config: AlgoConfig, view: LossView) -> None:
    """Loss that takes config and view in one call, instead of returning a function of the view."""


def returns_nothing(config: AlgoConfig) -> None:
    """Loss or advantage that returns None instead of a function."""


def without_entropy(config: AlgoConfig) -> object:
    """Loss without ``needs_entropy``."""
    return lambda view: view


def fails(config: AlgoConfig) -> None:
    """Loss that raises when it is constructed."""
    raise ValueError("no such setting")


def one_number(rewards_G: F32) -> F32:
    """Advantage with one value for the group instead of one per reward."""
    return rewards_G.mean(keepdims=True)


def loss_of_view(view: LossView) -> LossOutput:
    """Loss that takes the view instead of the config."""
    return LossOutput(-view.logprobs, {}, {})
