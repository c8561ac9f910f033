"""Collectives of a rank: sums, waits for gathered weights, and actions of rank 0 whose errors are raised on every rank."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from slime_like.errors import CheckpointError


def on_rank_zero(action: Callable[[], None]) -> None:
    """Run ``action`` on rank 0 while the other ranks wait. Collective.

    Raises ``CheckpointError`` on every rank if ``action`` raises ``CheckpointError`` or ``OSError``. Any other error is
    a bug: rank 0 raises it unchanged, and the other ranks raise ``CheckpointError`` with its text.
    """
    outcome: list[str | None] = [None]
    bug: Exception | None = None
    if dist.get_rank() == 0:
        try:
            action()
        except CheckpointError as error:
            outcome = [str(error)]
        except OSError as error:
            # The error of a write to a full disk names no file.
            outcome = [f"{error.filename or 'the disk'}: {error.strerror}; choose a folder on a writable disk"]
        except Exception as error:  # noqa: BLE001  raised below, once the other ranks know of it
            bug, outcome = error, [f"rank 0 failed: {type(error).__name__}: {error}"]
    dist.broadcast_object_list(outcome)
    if bug is not None:
        raise bug
    if outcome[0] is not None:
        raise CheckpointError(outcome[0])


def make_empty(folder: Path) -> None:
    """Create ``folder`` and its parents; if it exists, empty it."""
    if folder.exists():
        shutil.rmtree(folder)
    folder.mkdir(parents=True)


class GroupSum:
    """``algo_interfaces.Reduce`` over a process group."""

    def __init__(self, group: Any) -> None:
        self._group = group

    def sum(self, value: Tensor) -> Tensor:
        """Return the element-wise sum; ``value`` is not changed. Collective."""
        out = value.clone()
        dist.all_reduce(out, group=self._group)
        return out


class DifferentiableSum:
    """Differentiable ``algo_interfaces.Reduce`` over ``group``: the backward pass sums the gradient over the same ranks.

    Each rank's loss depends on the total and so on every rank's summand. The gradient of a summand is therefore the sum, over
    all ranks, of the gradients with respect to the total. In a group of one rank there is no collective.
    """

    def __init__(self, group: Any) -> None:
        self._group = group

    def sum(self, value: Tensor) -> Tensor:
        """Return the element-wise sum; ``value`` is not changed. Collective, and so is its backward pass."""
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


def wait_for_weights(part: torch.nn.Module) -> None:
    """Wait until overlap_param_gather has gathered the weights that ``part`` itself holds, without those of its submodules.

    Required before a read of these weights outside the forward of ``part``. Collective over the data parallel ranks, because
    megatron may start a gather here.
    """
    for hook in part._forward_pre_hooks.values():  # pyright: ignore[reportPrivateUsage]  no public function lists hooks
        hook(part, ())
