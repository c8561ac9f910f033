"""What an optimizer step reports: weighted sums and maxima, reduced once over the ranks that hold parts of the batch."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from slime_like.interfaces import LossOutput
from slime_like.metrics.types import Max, Mean, Metric

DRIFT = "train_rollout_logprob_abs_diff"  # measured here, over tokens of the trainer's own version only


@dataclass(slots=True)
class StepReport:
    """Sums over the micro-batches of one optimizer step on this rank."""

    sums: dict[str, Tensor] = field(default_factory=dict[str, Tensor])  # F64 []
    maxima: dict[str, Tensor] = field(default_factory=dict[str, Tensor])
    diffs: list[Tensor] = field(default_factory=list[Tensor])  # trainer minus rollout, tokens of the own version
    tokens: int = 0
    sampled: int = 0  # trained tokens that an engine sampled, of whatever version

    @torch.no_grad()
    def add(self, out: LossOutput, weight_N: Tensor, columns: Mapping[str, Tensor]) -> None:
        """Count one micro-batch: its loss, the loss's own means and maxima, and further columns to average."""
        self.tokens += len(weight_N)
        self._sum("weight", weight_N)
        self._sum("loss", weight_N * out.loss.detach())
        for name, values in {**out.means, **columns}.items():
            self._sum(f"mean/{name}", weight_N * values.detach())
        for name, values in out.maxima.items():
            top = values.detach().double().amax() if len(values) else torch.tensor(float("-inf"), dtype=torch.float64)
            top = top.to(weight_N.device)
            self.maxima[name] = torch.maximum(self.maxima[name], top) if name in self.maxima else top

    def _sum(self, name: str, values: Tensor) -> None:
        total = values.double().sum()
        self.sums[name] = self.sums[name] + total if name in self.sums else total

    def metrics(self, group: Any, num_tokens: int) -> list[Metric]:
        """Global values, the same on every rank of ``group``. Means are means over the weights."""
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
            if kind == "mean" and not metric.startswith(DRIFT):
                out.append(Mean(f"train/{metric}", total[name] / weight))
        return [*out, *self._maxima(group)]

    def _maxima(self, group: Any) -> Iterable[Metric]:
        names = sorted(name for name in self.maxima if not name.startswith(DRIFT))
        if not names:
            return []
        tops = torch.stack([self.maxima[name] for name in names])
        dist.all_reduce(tops, op=dist.ReduceOp.MAX, group=group)
        return [Max(f"train/{name}", value) for name, value in zip(names, tops.tolist(), strict=True)]

    def drift(self, group: Any, device: torch.device) -> list[Metric]:
        """|trainer - rollout| log-probability of trained tokens that the trainer's own version sampled.

        Other tokens are off-policy by design and only counted. k3 as in http://joschu.net/blog/kl-approx.html.
        """
        local = torch.cat([torch.zeros(0, device=device), *self.diffs])
        diffs = gather_ragged(local, group).cpu().numpy().astype(np.float64)
        sampled = torch.tensor(self.sampled, device=device)
        dist.all_reduce(sampled, group=group)
        if not int(sampled):  # demonstrations: no engine to compare with
            return []
        metrics: list[Metric] = [Mean("train/off_policy_token_ratio", 1.0 - len(diffs) / int(sampled))]
        if len(diffs):
            size = np.abs(diffs)
            metrics += [
                Mean(f"train/{DRIFT}", float(size.mean())),
                Max(f"train/{DRIFT}_p99", float(np.quantile(size, 0.99))),
                Max(f"train/{DRIFT}_max", float(size.max())),
                Mean("train/train_rollout_kl_k3", float((np.expm1(diffs) - diffs).mean())),
            ]
        return metrics


def gather_ragged(values_n: Tensor, group: Any) -> Tensor:
    """Concatenation over the ranks of ``group`` of vectors that differ in length."""
    world = dist.get_world_size(group)
    if world == 1:
        return values_n
    count = torch.tensor([len(values_n)], device=values_n.device)
    counts = [torch.zeros_like(count) for _ in range(world)]
    dist.all_gather(counts, count, group=group)
    longest = int(torch.cat(counts).max())
    padded = torch.nn.functional.pad(values_n, (0, longest - len(values_n)))
    parts = [torch.zeros_like(padded) for _ in range(world)]
    dist.all_gather(parts, padded, group=group)
    return torch.cat([part[: int(n)] for part, n in zip(parts, counts, strict=True)])
