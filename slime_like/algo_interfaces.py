"""Interfaces of the parts of an algorithm: group advantage, token advantage, loss, and the reductions available to them.

torch is imported only for type checking. ``algo.off_policy`` defines the interface of an off-policy correction.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, runtime_checkable

from slime_like.types import F32

if TYPE_CHECKING:
    from torch import Tensor


class GroupAdvantage(Protocol):
    """Function that maps the rewards of a group to advantages. It runs in the driver."""

    def __call__(self, rewards_G: F32) -> F32: ...


class Reduce(Protocol):
    """Element-wise sum over the ranks of a process group; for a ``TokenAdvantage``, over the data-parallel ranks.

    ``sum`` is a collective. An algorithm may use no collectives other than those of ``Reduce`` and ``Sequences``.
    """

    def sum(self, value: Tensor) -> Tensor: ...


@dataclass(frozen=True, slots=True)
class TokenView:
    """Input of a ``TokenAdvantage``: one packed micro-batch of a rank, with the log-probabilities that the ranks computed.

    Entry t of a [T] column describes token t, as in ``PackedBatch``. Sequences are complete even under context parallelism.
    Not to be confused with ``LossView``, the input of a loss, and ``data.token_table.TokenTable``, used by the report.
    """

    cu_seqlens: Tensor  # I32 [S + 1]
    loss_weight: Tensor  # F32 [T], 0 if not trained
    rewards: Tensor  # F32 [S]
    advantages: Tensor | None  # F32 [S], group advantages
    rollout_logprobs: Tensor  # F32 [T], under the policy that sampled the tokens
    old_logprobs: Tensor | None  # F32 [T], under the trained policy before the first optimizer step
    ref_logprobs: Tensor | None  # F32 [T], under the reference policy
    teacher_logprobs: Tensor | None = None  # F32 [T]
    values: Tensor | None = None  # F32 [T], a critic's estimate of the return, given the tokens before this one


class TokenAdvantage(Protocol):
    """Function that computes the advantages of a rank's tokens in a rollout, before the first optimizer step.

    It is constructed with the algorithm's config.
    """

    def __call__(self, views: Sequence[TokenView], reduce: Reduce) -> list[Tensor]:
        """Return the advantages F32 [T] for each view. There is one view per micro-batch."""
        ...


@runtime_checkable
class ReturnEstimator(Protocol):
    """A ``TokenAdvantage`` that also computes returns, the targets of a critic."""

    def returns(self, views: Sequence[TokenView]) -> list[Tensor]:
        """Return the targets F32 [T] for each view, 0 at untrained tokens."""
        ...


@runtime_checkable
class Diagnostics(Protocol):
    """A ``TokenAdvantage`` that reports additional metrics."""

    def diagnose(self, views: Sequence[TokenView], reduce: Reduce) -> Mapping[str, float]:
        """Return the value of each metric over all ranks, by name. The caller adds the prefix ``train/``."""
        ...


class Sequences(Protocol):
    """Reductions over each sequence of a micro-batch. Under context parallelism a rank holds only a part of each sequence.

    Axes: N = trained tokens on this rank, S = sequences. ``sum`` and ``mean`` are differentiable collectives over the ranks that
    share the sequences: each of these ranks must make the same calls in the same order, even if it holds none of the tokens.
    """

    def sum(self, values_N: Tensor) -> Tensor:
        """Return [S]: the sum over the trained tokens of each sequence."""
        ...

    def mean(self, values_N: Tensor) -> Tensor:
        """Return [S]: the mean over the trained tokens of each sequence."""
        ...

    def spread(self, values_S: Tensor) -> Tensor:
        """Return [N]: for each token, the value of its sequence. ``values_S`` is indexed by sequence."""
        ...


@dataclass(frozen=True, slots=True)
class LossView:
    """Input of a loss: the trained tokens of a micro-batch; under context parallelism, those on this rank."""

    logprobs: Tensor  # F32 [T], carries the gradient
    entropy: Tensor | None  # F32 [T], carries the gradient; present if the loss sets needs_entropy
    loss_weight: Tensor  # F32 [T]
    advantages: Tensor | None  # F32 [T]
    # F32 [T]; None if algo.kl_coef is 0 and either a rollout has one optimizer step or algo.use_rollout_logprobs is set
    old_logprobs: Tensor | None
    rollout_logprobs: Tensor  # F32 [T]
    ref_logprobs: Tensor | None  # F32 [T]
    sequences: Sequences | None = None  # reductions over whole sequences


@dataclass(frozen=True, slots=True)
class LossOutput:
    """Result of a loss. The caller sums ``loss * loss_weight``; ``means`` and ``maxima`` become metrics ``train/<name>``.

    The names must be the same for every micro-batch on every rank.
    """

    loss: Tensor  # F32 [T]
    means: Mapping[str, Tensor]  # by name, F32 [T]; the mean weighted by loss_weight is reported
    maxima: Mapping[str, Tensor]  # by name, F32 [T]; the maximum is reported


class LossFn(Protocol):
    """Per-token loss function, constructed with the algorithm's config."""

    needs_entropy: bool

    def __call__(self, view: LossView) -> LossOutput: ...
