"""Differentiable sums over ranks."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


class DifferentiableSum:
    """``Reduce`` over ``group`` whose backward pass sums the gradient over the same ranks.

    Each rank's loss depends on every rank's summand, so a summand's gradient is the sum of all ranks' gradients of the
    total. A group of one costs nothing.
    """

    def __init__(self, group: Any) -> None:
        self._group = group

    def sum(self, value: Tensor) -> Tensor:
        """Return the element-wise sum; ``value`` is not changed."""
        if dist.get_world_size(self._group) == 1:
            return value
        total: Any = _AllReduce.apply(value, self._group)
        return total


class _AllReduce(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, value: Tensor, group: Any) -> Tensor:
        ctx.group = group
        total = value.clone()
        dist.all_reduce(total, group=group)
        return total

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        total = gradients[0].clone(memory_format=torch.contiguous_format)
        dist.all_reduce(total, group=ctx.group)
        return total, None
