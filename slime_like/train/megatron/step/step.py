"""One optimizer step: gradients of the sum of loss_weight * loss over its micro-batches, update, metrics.

megatron divides gradients by the global count G of trained tokens (calculate_per_token_loss), so each micro-batch returns
``(sum(w * l) * G, n)``: w is a token's loss_weight, l its loss, and n the micro-batch's own count of trained tokens. The
gradients are those of the sum of w * l over all micro-batches and ranks, which does not depend on packing, micro-batching or
layout.

Axis suffixes: T tokens of the packed batch, N trained tokens on this rank, S sequences, L tokens of this rank's hidden states,
H hidden size.
"""

from __future__ import annotations

import zlib
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from slime_like.algo.loss import PackedSequences
from slime_like.algo_interfaces import LossFn, LossOutput, LossView
from slime_like.errors import UserCodeError
from slime_like.metrics.types import Last, Max, Mean, Metric
from slime_like.train.megatron.model.forward import LogprobSettings, MicroBatch, run_schedule, to_device
from slime_like.train.megatron.model.model import ModelSegments
from slime_like.train.megatron.platform.collective import DifferentiableSum
from slime_like.train.megatron.platform.groups import RankInfo
from slime_like.train.megatron.step.balance import ExpertBalance
from slime_like.train.megatron.step.sample_difference import SampleLogprobDifference
from slime_like.types import I64


class OptimizerStep(ABC):
    """Optimizer step on one rank. A subclass defines the loss."""

    reports_balance = True  # report the metrics of expert balance

    def __init__(self, wrapped: ModelSegments, optimizer: Any, schedule: Any, rank_info: RankInfo) -> None:
        self._wrapped = wrapped
        self._optimizer = optimizer
        self._schedule = schedule
        self._rank_info = rank_info
        self._balance = ExpertBalance(wrapped, rank_info)

    def __call__(
        self, micros: Sequence[MicroBatch], num_tokens: int, sample_difference: SampleLogprobDifference | None
    ) -> list[Metric]:
        """Update the weights. Return global metrics on the last pipeline stage, [] on other stages. Collective.

        In a policy's first optimizer step of a rollout, ``sample_difference`` compares the samples with the engine. If they
        differ by more than its tolerance, it raises ``ConsistencyError`` before the weights change. It is None in later steps,
        because no engine has their weights, and in all steps of a critic. Raises ``UserCodeError`` as the loss and ``StepReport``
        do.
        """
        report = self.backward(micros, num_tokens, sample_difference)
        balance = self._balance.close_step()
        drift_metrics = [] if sample_difference is None else sample_difference.close()
        self._schedule.step(1)
        has_updated, grad_norm, _ = self._optimizer.step()
        assert has_updated, "the optimizer skipped a step"
        if not self._rank_info.is_last:
            return []
        group = self._rank_info.dp_cp_group
        metrics = report.metrics(group, num_tokens)
        rate = max(float(g["lr"]) for g in self._optimizer.param_groups)
        return [
            *metrics,
            *drift_metrics,
            *(balance if self.reports_balance else ()),
            Mean("train/grad_norm", float(grad_norm)),
            Last("train/lr", rate),
        ]

    def backward(
        self, micros: Sequence[MicroBatch], num_tokens: int, sample_difference: SampleLogprobDifference | None
    ) -> StepReport:
        """Fill the gradient buffers with the reduced gradients of the optimizer step's loss. Return this rank's report.

        Collective.
        """
        report = StepReport()

        def on_output(micro: MicroBatch, hidden_L1H: Tensor) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
            loss, num_loss_tokens = self._loss_of(micro, hidden_L1H, report, sample_difference)
            return loss * num_tokens, torch.full((), num_loss_tokens, dtype=torch.int32, device=hidden_L1H.device), {}

        self._balance.open_step(micros, num_tokens)
        for segment in self._wrapped:
            segment.zero_grad_buffer()  # pyright: ignore[reportCallIssue]
        self._optimizer.zero_grad()
        run_schedule(self._wrapped, micros, on_output, train=True)
        return report

    @abstractmethod
    def _loss_of(
        self,
        micro: MicroBatch,
        hidden_L1H: Tensor,
        report: StepReport,
        sample_difference: SampleLogprobDifference | None,
    ) -> tuple[Tensor, int]:
        """Return the sum of weight * loss over the micro-batch's trained tokens on this rank, and the number of these tokens.

        Also add the micro-batch to ``report`` and, in a policy, to ``sample_difference`` unless that is None.
        """


class PolicyStep(OptimizerStep):
    """Optimizer steps of a policy on the loss of its algorithm."""

    def __init__(
        self,
        wrapped: ModelSegments,
        optimizer: Any,
        schedule: Any,
        loss: LossFn,
        logprob_settings: LogprobSettings,
        rank_info: RankInfo,
    ) -> None:
        super().__init__(wrapped, optimizer, schedule, rank_info)
        self._model = wrapped.last
        self._loss = loss
        self._logprob_settings = logprob_settings

    def _loss_of(
        self,
        micro: MicroBatch,
        hidden_L1H: Tensor,
        report: StepReport,
        sample_difference: SampleLogprobDifference | None,
    ) -> tuple[Tensor, int]:
        batch, device = micro.batch, hidden_L1H.device
        predictions = micro.layout.predictions(batch.loss_weight > 0)
        logprobs_N, entropy_N = self._model.scores(
            hidden_L1H,
            to_device(predictions.source, device),
            to_device(batch.token_ids[predictions.target].astype(np.int64), device),
            temperature=self._logprob_settings.temperature,
            chunk=self._logprob_settings.chunk,
            entropy=True,  # reported for every loss
        )
        assert entropy_N is not None, "scores(entropy=True) returned no entropy"
        view = self._view(micro, predictions.target, logprobs_N, entropy_N if self._loss.needs_entropy else None)
        out = self._loss(view)
        report.add(out, view.loss_weight, {"entropy": entropy_N.detach()})
        if sample_difference is not None:
            sample_difference.add(micro, predictions.target, logprobs_N)
        return (view.loss_weight * out.loss).sum(), len(predictions.target)

    def _view(self, micro: MicroBatch, target_N: I64, logprobs_N: Tensor, entropy_N: Tensor | None) -> LossView:
        """Return the loss's inputs for this rank's trained tokens ``target_N``."""
        batch, device = micro.batch, logprobs_N.device
        index_N = to_device(target_N, device)
        weight_N = to_device(batch.loss_weight[target_N], device)
        trained_T = batch.loss_weight > 0
        num_trained_S = micro.layout.segment_sum(trained_T.astype(np.float32), np.arange(len(trained_T)))

        def at_trained(column_T: Tensor | None) -> Tensor | None:
            return None if column_T is None else column_T[index_N]

        return LossView(
            logprobs=logprobs_N,
            entropy=entropy_N,
            loss_weight=weight_N,
            advantages=at_trained(micro.advantages),
            old_logprobs=at_trained(micro.old_logprobs),
            rollout_logprobs=to_device(batch.rollout_logprobs[target_N], device),
            ref_logprobs=at_trained(micro.ref_logprobs),
            sequences=PackedSequences(
                index_N=to_device(micro.layout.sequence_of(target_N), device),
                num_trained_S=to_device(num_trained_S, device),
                reduce=DifferentiableSum(self._rank_info.cp_group),
            ),
        )


@dataclass(slots=True)
class StepReport:
    """Sums and maxima over the micro-batches of one optimizer step on this rank."""

    sums: dict[str, Tensor] = field(default_factory=dict[str, Tensor])  # F64 []
    maxima: dict[str, Tensor] = field(default_factory=dict[str, Tensor])
    num_tokens: int = 0
    _names: list[str] | None = None  # names of means and maxima, the same for all micro-batches

    @torch.no_grad()
    def add(self, out: LossOutput, weight_N: Tensor, columns: Mapping[str, Tensor]) -> None:
        """Add a micro-batch: its loss, the loss function's means and maxima, and ``columns``, which are averaged too.

        Raises ``UserCodeError`` if the names of the means and maxima differ from those of an earlier micro-batch.
        """
        names = [*sorted(f"means[{name!r}]" for name in out.means), *sorted(f"maxima[{name!r}]" for name in out.maxima)]
        if self._names is not None and self._names != names:
            raise UserCodeError(
                f"the loss returned {_text(self._names)} for one micro-batch and {_text(names)} for another of the same step: "
                "return the same names in means and maxima for every micro-batch, even for one without tokens"
            )
        self._names = names
        self.num_tokens += len(weight_N)
        self._sum("weight", weight_N)
        self._sum("loss", weight_N * out.loss.detach())
        for name, values_N in {**out.means, **columns}.items():
            self._sum(f"mean/{name}", weight_N * values_N.detach())
        for name, values_N in out.maxima.items():
            maximum = (
                values_N.detach().double().amax()
                if len(values_N)
                else torch.full((), float("-inf"), dtype=torch.float64, device=weight_N.device)
            )
            self.maxima[name] = torch.maximum(self.maxima[name], maximum) if name in self.maxima else maximum

    def _sum(self, name: str, values_N: Tensor) -> None:
        total = values_N.double().sum()
        self.sums[name] = self.sums[name] + total if name in self.sums else total

    def metrics(self, group: Any, num_tokens: int) -> list[Metric]:
        """Return global metrics, the same on every rank of ``group``.

        Means are weighted by ``loss_weight``. Collective.
        Raises ``UserCodeError`` on every rank if the names of the loss function's means and maxima differ between ranks.
        """
        names = sorted(self.sums)
        device = self.sums["weight"].device
        self._require_equal_names(group, device)
        num_local = torch.full((), float(self.num_tokens), dtype=torch.float64, device=device)
        totals = torch.stack([num_local, *(self.sums[name] for name in names)])
        dist.all_reduce(totals, group=group)
        num_global, *values = totals.tolist()
        assert num_global == num_tokens, (
            f"{num_global:.0f} tokens have loss_weight > 0, but the batch has num_tokens={num_tokens}"
        )
        total = dict(zip(names, values, strict=True))
        weight = total["weight"] or 1.0
        out: list[Metric] = [Mean("train/loss", total["loss"])]
        for name in names:
            kind, _, metric = name.partition("/")
            if kind == "mean":
                out.append(Mean(f"train/{metric}", total[name] / weight))
        return [*out, *self._maxima(group)]

    def _require_equal_names(self, group: Any, device: torch.device) -> None:
        """Raise ``UserCodeError`` unless the loss function's means and maxima have the same names on all ranks. Collective.

        An all-reduce of different metrics would hang or mix them up.
        """
        digest = float(zlib.crc32(repr(self._names).encode()))
        largest_and_smallest = torch.full((2,), digest, dtype=torch.float64, device=device)
        largest_and_smallest[1:].neg_()
        dist.all_reduce(largest_and_smallest, op=dist.ReduceOp.MAX, group=group)
        if largest_and_smallest.sum() != 0:
            raise UserCodeError(
                f"the loss returned {_text(self._names)} on this rank and different names on another rank: return the same names in "
                "means and maxima on every rank, even for a micro-batch without tokens"
            )

    def _maxima(self, group: Any) -> Iterable[Metric]:
        names = sorted(self.maxima)
        if not names:
            return []
        maxima = torch.stack([self.maxima[name] for name in names])
        dist.all_reduce(maxima, op=dist.ReduceOp.MAX, group=group)
        return [Max(f"train/{name}", value) for name, value in zip(names, maxima.tolist(), strict=True)]


def _text(names: Sequence[str] | None) -> str:
    return ", ".join(names or ()) or "no means and maxima"
