"""Lookup of the loss, token advantage and correction that the config names. Errors in user code name the key and the line."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import cast

from torch import Tensor

from slime_like.algo.off_policy import Correction, OffPolicy
from slime_like.algo_interfaces import (
    Diagnostics,
    LossFn,
    LossOutput,
    LossView,
    Reduce,
    ReturnEstimator,
    Sequences,
    TokenAdvantage,
    TokenView,
)
from slime_like.config.schema.names import LOSSES, OFF_POLICY, TOKEN_ADVANTAGES
from slime_like.config.schema.policy import AlgoConfig, PolicyConfig
from slime_like.errors import UserCodeError
from slime_like.registry import is_user_code, resolve
from slime_like.util.user_code import name_user_errors

LOSS, TOKEN = "algo.loss", "algo.token_advantage"
CORRECTION = "algo.off_policy"


def bind_loss(config: AlgoConfig) -> LossFn:
    """Return the loss that ``config`` names, constructed with ``config``.

    Raises ``ConfigError`` if the loss, or a KL estimator or correction that it uses, is unknown or not importable.
    """
    loss: LossFn = resolve(LOSS, config.loss, LOSSES)(config)
    return UserLoss(config.loss, loss, loss.needs_entropy) if is_user_code(config.loss, LOSSES) else loss


def bind_token_advantage(config: AlgoConfig) -> TokenAdvantage | None:
    """Return the token advantage that ``config`` names, constructed with ``config``; None if ``algo.token_advantage`` is null.

    Raises ``ConfigError`` if the advantage, or a KL estimator that it uses, is unknown or not importable, or if an advantage of
    this project does not support ``config``.
    """
    name = config.token_advantage
    return None if name is None else resolve(TOKEN, name, TOKEN_ADVANTAGES)(config)


def bind_off_policy(config: PolicyConfig) -> OffPolicy:
    """Return the off-policy correction that ``config`` names. Raises ``ConfigError`` if it is unknown or not importable."""
    correct: OffPolicy = resolve(CORRECTION, config.off_policy, OFF_POLICY)
    return UserCorrection(config.off_policy, correct) if is_user_code(config.off_policy, OFF_POLICY) else correct


@dataclass(slots=True)
class UserLoss:
    """Loss of a user: an import path, or a table entry that leads to one. Errors in it are raised as ``UserCodeError``."""

    name: str
    loss: LossFn
    needs_entropy: bool

    def __call__(self, view: LossView) -> LossOutput:
        """Return the loss.

        Raises ``UserCodeError`` if the user's loss raises, or does not return a ``LossOutput`` whose tensors have the shape
        of ``logprobs`` in ``view``.
        """
        subject = f"a micro-batch of {len(view.logprobs)} tokens on this rank"
        with name_user_errors(LOSS, self.name, subject):
            output = cast(object, self.loss(view))  # user code may return anything
            columns = _columns_of(output) if isinstance(output, LossOutput) else {}
            expected = tuple(view.logprobs.shape)
            wrong_columns = [f"{name} {shape}" for name, shape in columns.items() if shape != expected]
        if wrong_columns or not isinstance(output, LossOutput):
            raise UserCodeError(
                f"{LOSS}={self.name} returned {', '.join(wrong_columns) or type(output).__name__} for {subject}: return "
                "LossOutput(loss, means, maxima) with one loss per token, neither weighted nor summed, and tensors of the "
                "same shape in means and maxima"
            )
        return output


def _columns_of(output: LossOutput) -> dict[str, object]:
    """Map the name of each column of a loss to its shape, or to the name of its type if it is not a tensor."""
    columns: dict[str, object] = {"loss": output.loss}
    columns |= {f"means[{name!r}]": column for name, column in output.means.items()}
    columns |= {f"maxima[{name!r}]": column for name, column in output.maxima.items()}
    return {name: _shape(column) for name, column in columns.items()}


def _shape(column: object) -> object:
    """Return the shape of a column, or the name of its type if it is not a tensor."""
    return tuple(column.shape) if isinstance(column, Tensor) else type(column).__name__


@dataclass(frozen=True, slots=True)
class UserCorrection:
    """Correction of a user: an import path, or a table entry that leads to one. Errors in it are raised as ``UserCodeError``."""

    name: str
    correct: OffPolicy

    def __call__(
        self, config: PolicyConfig, old_logprobs_T: Tensor, rollout_logprobs_T: Tensor, sequences: Sequences | None, /
    ) -> Correction:
        """Return the correction.

        Raises ``UserCodeError`` if the function raises, or does not return a ``Correction`` whose factors are None or have
        the shape of ``old_logprobs_T``.
        """
        shape = tuple(old_logprobs_T.shape)
        subject = f"a micro-batch of {len(old_logprobs_T)} tokens on this rank"
        with name_user_errors(CORRECTION, self.name, subject):
            output = cast(object, self.correct(config, old_logprobs_T, rollout_logprobs_T, sequences))
        factors = (output.weight, output.keep) if isinstance(output, Correction) else ()
        shapes = [None if factor is None else _shape(factor) for factor in factors]
        if not isinstance(output, Correction) or any(actual not in (None, shape) for actual in shapes):
            raise UserCodeError(
                f"{CORRECTION}={self.name} returned {shapes or type(output).__name__} for {subject}: return Correction(weight, "
                f"keep, means), weight and keep with shape {shape} or None"
            )
        return output


def token_advantages(
    config: AlgoConfig, advantage: TokenAdvantage, views: Sequence[TokenView], reduce: Reduce
) -> list[Tensor]:
    """Return the advantages [T] of each view.

    This is a collective over the ranks of ``reduce`` if ``advantage`` calls ``reduce``.
    Raises ``UserCodeError`` if a user's advantage raises or returns wrong shapes.
    """
    return _columns(config, views, lambda: advantage(views, reduce))


def critic_targets(config: AlgoConfig, advantage: ReturnEstimator, views: Sequence[TokenView]) -> list[Tensor]:
    """Return the critic's targets [T] for each view. Raises ``UserCodeError`` as ``token_advantages`` does."""
    return _columns(config, views, lambda: advantage.returns(views))


def diagnose(
    config: AlgoConfig, advantage: Diagnostics, views: Sequence[TokenView], reduce: Reduce
) -> Mapping[str, float]:
    """Return the metrics of a token advantage.

    This is a collective over the ranks of ``reduce`` if ``advantage`` calls ``reduce``.
    Raises ``UserCodeError`` if a user's advantage raises.
    """
    name = config.token_advantage or ""
    if not is_user_code(name, TOKEN_ADVANTAGES):
        return advantage.diagnose(views, reduce)
    with name_user_errors(TOKEN, name, f"{len(views)} micro-batches on this rank"):
        return advantage.diagnose(views, reduce)


def _columns(config: AlgoConfig, views: Sequence[TokenView], compute: Callable[[], Sequence[Tensor]]) -> list[Tensor]:
    """Return the columns from ``compute``. Raises ``UserCodeError`` if user code raises or returns wrong shapes."""
    name, subject = config.token_advantage or "", f"{len(views)} micro-batches on this rank"
    if not is_user_code(name, TOKEN_ADVANTAGES):
        return list(compute())
    with name_user_errors(TOKEN, name, subject):
        columns = list(compute())
        shapes = [tuple(column.shape) for column in columns]
    if shapes != (expected := [tuple(view.loss_weight.shape) for view in views]):
        raise UserCodeError(
            f"{TOKEN}={name} returned shapes {shapes} for {subject}: return {expected}, one number per token"
        )
    return columns
