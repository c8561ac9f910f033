"""Metrics of an optimizer step: weighted sums and maxima, reduced once over the ranks that hold parts of the batch."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from slime_like.interfaces import LossOutput
from slime_like.metrics.types import Max, Mean, Metric


@dataclass(slots=True)
class StepReport:
    """Sums over the micro-batches of one optimizer step on this rank."""

    sums: dict[str, Tensor] = field(default_factory=dict[str, Tensor])  # F64 []
    maxima: dict[str, Tensor] = field(default_factory=dict[str, Tensor])
    tokens: int = 0

    @torch.no_grad()
    def add(self, out: LossOutput, weight_N: Tensor, columns: Mapping[str, Tensor]) -> None:
        """Add one micro-batch: its loss, the loss's means and maxima, and further columns to average."""
        self.tokens += len(weight_N)
        self._sum("weight", weight_N)
        self._sum("loss", weight_N * out.loss.detach())
        for name, values_N in {**out.means, **columns}.items():
            self._sum(f"mean/{name}", weight_N * values_N.detach())
        for name, values_N in out.maxima.items():
            top = (
                values_N.detach().double().amax() if len(values_N) else torch.tensor(float("-inf"), dtype=torch.float64)
            )
            top = top.to(weight_N.device)
            self.maxima[name] = torch.maximum(self.maxima[name], top) if name in self.maxima else top

    def _sum(self, name: str, values_N: Tensor) -> None:
        total = values_N.double().sum()
        self.sums[name] = self.sums[name] + total if name in self.sums else total

    def metrics(self, group: Any, num_tokens: int) -> list[Metric]:
        """Return global values, the same on every rank of ``group``. Means are weighted by ``weight_N``."""
        names = sorted(self.sums)
        device = self.sums["weight"].device
        counted = torch.tensor(float(self.tokens), dtype=torch.float64, device=device)
        totals = torch.stack([counted, *(self.sums[name] for name in names)])
        dist.all_reduce(totals, group=group)
        tokens, *values = totals.tolist()
        assert tokens == num_tokens, (
            f"{tokens:.0f} tokens have loss_weight > 0 but the batch says num_tokens={num_tokens}"
        )
        total = dict(zip(names, values, strict=True))
        weight = total["weight"] or 1.0
        out: list[Metric] = [Mean("train/loss", total["loss"])]
        for name in names:
            kind, _, metric = name.partition("/")
            if kind == "mean":
                out.append(Mean(f"train/{metric}", total[name] / weight))
        return [*out, *self._maxima(group)]

    def _maxima(self, group: Any) -> Iterable[Metric]:
        names = sorted(self.maxima)
        if not names:
            return []
        tops = torch.stack([self.maxima[name] for name in names])
        dist.all_reduce(tops, op=dist.ReduceOp.MAX, group=group)
        return [Max(f"train/{name}", value) for name, value in zip(names, tops.tolist(), strict=True)]
