"""Balance of expert load: the scale of the auxiliary loss, and metrics per optimizer step.

Axis suffixes: E routed experts of a layer; a digit is the size of its axis.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from slime_like.metrics.types import Max, Mean, Metric
from slime_like.train.megatron.model.forward import MicroBatch
from slime_like.train.megatron.model.model import ModelSegments
from slime_like.train.megatron.model.moe import ExpertRouter
from slime_like.train.megatron.platform.groups import RankInfo


class ExpertBalance:
    """Scale of the auxiliary loss, and metrics of expert load, in one rank's model.

    Methods are collectives; they do nothing in a model without experts.
    """

    def __init__(self, wrapped: ModelSegments, rank_info: RankInfo) -> None:
        self._routers = [module for module in wrapped.modules() if isinstance(module, ExpertRouter)]
        self._config: Any = wrapped.last.config
        self._has_experts = self._config.num_moe_experts is not None
        self._rank_info = rank_info
        self._num_tokens = 0.0

    def open_step(self, micros: Sequence[MicroBatch], num_tokens: int) -> None:
        """Reset the routers' load and set the scale of the auxiliary loss. Must run before the forward pass.

        Gradients are divided by ``num_tokens``, the number of trained tokens, but the auxiliary loss is a mean over all tokens
        of the optimizer step, so it is scaled by ``num_tokens`` divided by the number of all tokens.
        """
        if not self._has_experts:
            return
        for router in self._routers:
            router.pop_load_and_balance()
        total = torch.full((), float(sum(m.layout.num_tokens for m in micros)), device=self._rank_info.device)
        dist.all_reduce(total, group=self._rank_info.dp_group)
        self._num_tokens = max(1.0, float(total))
        scale = torch.full((1,), num_tokens / self._num_tokens, device=self._rank_info.device)
        self._config.moe_grad_scale_func = lambda: scale

    def close_step(self) -> list[Metric]:
        """Return global metrics, the same on every rank; [] for a model without experts. Collective.

        Must run after the backward pass. The metric ``train/moe_load`` is the number of tokens of a layer's busiest expert
        divided by the mean over its experts, averaged over the layers; 1 is balanced.
        """
        if not self._has_experts:
            return []
        device = self._rank_info.device
        sums_3, max_1 = (torch.zeros(n, dtype=torch.float64, device=device) for n in (3, 1))
        for router in self._routers:
            load_E, balance = router.pop_load_and_balance()
            totals = torch.cat((load_E, balance[None]))  # [E + 1]
            dist.all_reduce(totals, group=router.tp_dp_cp_group)
            load_E, balance = totals[:-1], totals[-1]
            ratio = load_E.max() / load_E.mean().clamp(min=1e-9)
            sums_3 += torch.stack((torch.ones_like(ratio), ratio, balance / self._num_tokens))
            max_1 = torch.maximum(max_1, ratio)
        dist.all_reduce(sums_3, group=self._rank_info.pp_group)
        dist.all_reduce(max_1, op=dist.ReduceOp.MAX, group=self._rank_info.pp_group)
        num_layers, ratio, balance = sums_3.tolist()
        metrics: list[Metric] = [Mean("train/moe_load", ratio / num_layers), Max("train/moe_load_max", float(max_1))]
        if self._config.moe_aux_loss_coeff:
            metrics.append(Mean("train/moe_aux_loss", balance / num_layers))
        return metrics
