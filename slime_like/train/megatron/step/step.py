"""One optimizer step: micro-batches in, gradients of exactly the sum of loss_weight * loss, update, report.

megatron divides gradients by the global count of trained tokens (calculate_per_token_loss), so each micro-batch hands
it ``(sum(w * l) * N, n)`` with N the global count and n its own: what remains is the sum of w * l over all micro-batches
and ranks, whatever packing, micro-batching and layout.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from slime_like.algo.sequences import PackedSequences
from slime_like.interfaces import LossFn, LossView
from slime_like.metrics.types import Last, Mean, Metric
from slime_like.train.megatron.model.forward import MicroBatch, Scoring, run_schedule, to_device
from slime_like.train.megatron.model.model import Chunks
from slime_like.train.megatron.platform.groups import RankInfo
from slime_like.train.megatron.step.balance import ExpertBalance
from slime_like.train.megatron.step.drift import Drift
from slime_like.train.megatron.step.reduce import DifferentiableSum
from slime_like.train.megatron.step.reports import StepReport
from slime_like.types import I64


class OptimizerStep(ABC):
    """Takes optimizer steps on one rank; what is minimised is its subclass's."""

    reports_balance = True

    def __init__(self, wrapped: Chunks, optimizer: Any, schedule: Any, place: RankInfo) -> None:
        self._wrapped = wrapped
        self._optimizer = optimizer
        self._schedule = schedule
        self._place = place
        self._balance = ExpertBalance(wrapped, place)

    def __call__(self, micros: Sequence[MicroBatch], num_tokens: int, drift: Drift | None) -> list[Metric]:
        """Update the weights; on the last pipeline stage return global metrics.

        ``drift`` counts the samples of the first update after a rollout against the engine, and raises
        ``ConsistencyError`` before the weights change; None for later updates, whose weights no engine has had.
        """
        report = self.backward(micros, num_tokens, drift)
        balance = self._balance.close_step()
        compared = [] if drift is None else drift.close()
        self._schedule.step(1)
        updated, grad_norm, _ = self._optimizer.step()
        assert updated, "the optimizer skipped a step"
        if not self._place.is_last:
            return []
        group = self._place.dp_cp_group
        metrics = report.metrics(group, num_tokens)
        rate = max(float(g["lr"]) for g in self._optimizer.param_groups)
        return [
            *metrics,
            *compared,
            *(balance if self.reports_balance else ()),
            Mean("train/grad_norm", float(grad_norm)),
            Last("train/lr", rate),
        ]

    def backward(self, micros: Sequence[MicroBatch], num_tokens: int, drift: Drift | None) -> StepReport:
        """Fill the gradient buffers with reduced gradients of the step's loss."""
        report = StepReport()

        def after(micro: MicroBatch, hidden: Tensor) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
            loss, count = self._loss_of(micro, hidden, report, drift)
            return loss * num_tokens, torch.tensor(count, dtype=torch.int32, device=hidden.device), {}

        self._balance.open_step(micros, num_tokens)
        for chunk in self._wrapped:
            chunk.zero_grad_buffer()  # pyright: ignore[reportCallIssue]
        self._optimizer.zero_grad()
        run_schedule(self._wrapped, micros, after, train=True)
        return report

    @abstractmethod
    def _loss_of(
        self, micro: MicroBatch, hidden: Tensor, report: StepReport, drift: Drift | None
    ) -> tuple[Tensor, int]:
        """Sum of weight * loss over the micro-batch's trained tokens on this rank, and how many they are."""


class PolicyStep(OptimizerStep):
    """Optimizer steps of a policy under a token loss."""

    def __init__(
        self, wrapped: Chunks, optimizer: Any, schedule: Any, loss: LossFn, scoring: Scoring, place: RankInfo
    ) -> None:
        super().__init__(wrapped, optimizer, schedule, place)
        self._model = wrapped.last
        self._loss = loss
        self._scoring = scoring

    def _loss_of(
        self, micro: MicroBatch, hidden: Tensor, report: StepReport, drift: Drift | None
    ) -> tuple[Tensor, int]:
        rows, device = micro.rows, hidden.device
        found = micro.layout.predictions(rows.loss_weight > 0)
        logprobs, entropy = self._model.scores(
            hidden,
            to_device(found.source, device),
            to_device(rows.token_ids[found.target].astype(np.int64), device),
            temperature=self._scoring.temperature,
            chunk=self._scoring.chunk,
            entropy=True,  # reported under every loss
        )
        assert entropy is not None, "the scores of a model come with its entropy where that is asked for"
        view = self._view(micro, found.target, logprobs, entropy if self._loss.needs_entropy else None)
        out = self._loss(view)
        report.add(out, view.loss_weight, {"entropy": entropy.detach()})
        if drift is not None:
            drift.add(micro, found.target, logprobs)
        return (view.loss_weight * out.loss).sum(), len(found.target)

    def _view(self, micro: MicroBatch, target_N: I64, logprobs: Tensor, entropy: Tensor | None) -> LossView:
        """This rank's trained tokens, which are rows ``target_N``, as the loss sees them."""
        rows, device = micro.rows, logprobs.device
        target = to_device(target_N, device)
        weight = to_device(rows.loss_weight[target_N], device)
        trained_T = rows.loss_weight > 0
        num_trained = micro.layout.segment_sum(trained_T.astype(np.float32), np.arange(len(trained_T)))
        pick = lambda column: None if column is None else column[target]  # noqa: E731
        return LossView(
            logprobs=logprobs,
            entropy=entropy,
            loss_weight=weight,
            advantages=pick(micro.advantages),
            old_logprobs=pick(micro.old_logprobs),
            rollout_logprobs=to_device(rows.rollout_logprobs[target_N], device),
            ref_logprobs=pick(micro.ref_logprobs),
            sequences=PackedSequences(
                index=to_device(micro.layout.sequence_of(target_N), device),
                trained=weight > 0,
                num_trained=to_device(num_trained, device),
                reduce=DifferentiableSum(self._place.cp_group),
            ),
        )
