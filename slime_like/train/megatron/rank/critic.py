"""One critic rank: values of a rollout, then regression on its returns."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import Tensor

from slime_like.algo.value_loss import value_loss
from slime_like.batch import Columns, PackedBatch
from slime_like.config.schema.resolved import CriticSpec
from slime_like.distributed.wrapper import install
from slime_like.metrics.types import Last, Metric
from slime_like.train.megatron.model.forward import MicroBatch, to_device
from slime_like.train.megatron.model.model import ModelSegments
from slime_like.train.megatron.model.value_model import ValueModel, value_micros
from slime_like.train.megatron.model_io.load import load_weights
from slime_like.train.megatron.platform.groups import RankInfo
from slime_like.train.megatron.rank.rank_model import RankModel
from slime_like.train.megatron.step import optim
from slime_like.train.megatron.step.sample_difference import SampleLogprobDifference
from slime_like.train.megatron.step.step import OptimizerStep, StepReport

CRITIC_ONLY = frozenset(
    {"value_loss", "value_clipfrac", "values", "returns"}
)  # metrics that the policy does not report


class ValueStep(OptimizerStep):
    """Optimizer steps on the value loss."""

    reports_balance = False  # the policy reports its balance under the same names

    def __init__(
        self, wrapped: ModelSegments, optimizer: Any, schedule: Any, clip: float | None, rank_info: RankInfo
    ) -> None:
        super().__init__(wrapped, optimizer, schedule, rank_info)
        model = wrapped.last
        assert isinstance(model, ValueModel)
        self._model = model
        self._clip = clip

    def _loss_of(
        self,
        micro: MicroBatch,
        hidden_L1H: Tensor,
        report: StepReport,
        sample_difference: SampleLogprobDifference | None,
    ) -> tuple[Tensor, int]:
        del sample_difference
        batch, device = micro.batch, hidden_L1H.device
        predictions = micro.layout.predictions(batch.loss_weight > 0)
        target_N = to_device(predictions.target, device)
        assert micro.values is not None and micro.returns is not None
        values_N = self._model.values(hidden_L1H, to_device(predictions.source, device))
        weight_N = to_device(batch.loss_weight[predictions.target], device)
        out = value_loss(values_N, micro.values[target_N], micro.returns[target_N], self._clip)
        report.add(out, weight_N, {})
        return (weight_N * out.loss).sum(), len(predictions.target)


class RankCritic(RankModel):
    """The value model on one rank. ``score`` and ``update`` are collectives: every rank calls them in the same order."""

    def __init__(self, spec: CriticSpec, rank_info: RankInfo) -> None:
        super().__init__(spec.rank, rank_info, ValueModel)
        self.optimizer_step = ValueStep(self.wrapped, self.optimizer, self.schedule, spec.value_clip, rank_info)
        if spec.load is not None:
            load_weights(self.state(), Path(spec.load))

    def score(self, steps: Sequence[Sequence[PackedBatch]]) -> tuple[Columns | None, tuple[Metric, ...]]:
        """Return a rollout's values, and this rank's ``comm/...`` and ``guard/...`` metrics.

        The values are None except on the reporter of each shard. The rollout stays open for ``update``. Raises ``DataError`` as
        ``lay_out`` does.
        """
        with install.phase("score"):
            columns = self._values(steps)
        return columns, tuple(install.drain())

    def _values(self, steps: Sequence[Sequence[PackedBatch]]) -> Columns | None:
        start = time.perf_counter()
        rollout = self.open(steps)
        values = value_micros(self.wrapped, rollout.micros)
        for micro, column in zip(rollout.micros, values, strict=True) if values else ():
            micro.values = column
        rollout.metrics.append(Last("perf/values_time", time.perf_counter() - start))
        return rollout.group_by_step(values) if self.rank_info.is_shard_reporter else None

    def update(self, returns: Columns, num_tokens: Sequence[int]) -> tuple[Metric, ...]:
        """Take the optimizer steps of the open rollout and close it.

        Return global metrics on the reporter, and on every rank its own ``comm/...`` and ``guard/...`` metrics.
        """
        with install.phase("step"):
            metrics = self._update(returns, num_tokens)
        self.version += 1
        return (*metrics, *install.drain())

    def _update(self, returns: Columns, num_tokens: Sequence[int]) -> tuple[Metric, ...]:
        rollout = self.close()
        start = time.perf_counter()
        if self.rank_info.is_last:
            rollout.fill("returns", returns, self.rank_info.device)
        metrics = rollout.metrics
        for micros, num_step_tokens in zip(rollout.micros_by_step, num_tokens, strict=True):
            metrics += [_rename(metric) for metric in self.optimizer_step(micros, num_step_tokens, None)]
        optim.gather_parameters(self.wrapped)
        metrics.append(Last("perf/critic_train_time", time.perf_counter() - start))
        return tuple(metrics) if self.rank_info.is_reporter else ()


def _rename(metric: Metric) -> Metric:
    """Rename a metric, unless only the critic reports it: ``train/lr`` becomes ``train/critic_lr``."""
    name = metric.name.removeprefix("train/")
    return metric if name in CRITIC_ONLY else replace(metric, name=f"train/critic_{name}")
