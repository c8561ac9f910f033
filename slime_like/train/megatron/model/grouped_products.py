"""Autograd functions for several experts at once: multiplication of each expert's rows by its weight, and the activation.

On a GPU in bfloat16, one kernel computes the GEMMs of all experts (``torch.nn.functional.grouped_mm``). Elsewhere, each
expert's GEMM writes to its rows of the result, so that nothing is concatenated and autograd has one node for all experts.

Axes: R rows (tokens, ordered by expert), E experts, I inputs, O outputs, F features of SwiGLU.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor


class GroupedLinear(torch.autograd.Function):
    """Linear layer of each expert on its rows.

    The inputs are the rows [R, I], the number of rows of each expert, and a weight [O, I] per expert. The result is [R, O].
    """

    @staticmethod
    def forward(ctx: Any, rows_RI: Tensor, counts: tuple[int, ...], *weights: Tensor) -> Tensor:
        ctx.save_for_backward(rows_RI, *weights)
        ctx.counts = counts
        return _products(rows_RI, counts, weights, transpose=True)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        rows_RI, *weights = ctx.saved_tensors
        grad_RO = grads[0].contiguous()
        grad_rows = _products(grad_RO, ctx.counts, weights, transpose=False)
        return grad_rows, None, *_weight_grads(grad_RO, rows_RI, ctx.counts)


def _products(rows: Tensor, counts: Sequence[int], weights: Sequence[Tensor], *, transpose: bool) -> Tensor:
    """Return the rows of each expert multiplied by its weight or, if ``transpose``, by the weight's transpose."""
    if is_grouped(rows):
        stacked = torch.stack(list(weights))
        return F.grouped_mm(rows, stacked.mT if transpose else stacked, offs=_ends(counts, rows.device))
    matrices = [weight.T if transpose else weight for weight in weights]
    result = rows.new_empty(len(rows), matrices[0].shape[1])
    for part, matrix, out in zip(rows.split(counts), matrices, result.split(counts), strict=True):
        torch.mm(part, matrix, out=out)
    return result


def _weight_grads(grad_RO: Tensor, rows_RI: Tensor, counts: Sequence[int]) -> tuple[Tensor, ...]:
    """Return each weight's gradient [O, I]; zeros for an expert without rows."""
    if is_grouped(rows_RI):
        grad_EOI = F.grouped_mm(grad_RO.T, rows_RI, offs=_ends(counts, rows_RI.device))
        # On some GPUs the result of an empty group is not written (https://github.com/pytorch/pytorch/issues/172439).
        return tuple(grad if count else grad.zero_() for grad, count in zip(grad_EOI, counts, strict=True))
    grad_EOI = rows_RI.new_empty(len(counts), grad_RO.shape[1], rows_RI.shape[1])
    for grad, rows, out in zip(grad_RO.split(counts), rows_RI.split(counts), grad_EOI, strict=True):
        torch.mm(grad.T, rows, out=out)
    return grad_EOI.unbind()


def is_grouped(rows_RI: Tensor) -> bool:
    """Return True if one kernel can compute the GEMMs of all experts, which needs at least one row, bfloat16 and a GPU."""
    return rows_RI.device.type != "cpu" and rows_RI.dtype == torch.bfloat16 and len(rows_RI) > 0


def _ends(counts: Sequence[int], device: torch.device) -> Tensor:
    return torch.tensor(counts, dtype=torch.int32).cumsum(0, dtype=torch.int32).to(device, non_blocking=True)


class WeightedSwiGLU(torch.autograd.Function):
    """Row-weighted SwiGLU, which saves only its inputs: gate and up [R, 2 F], and probabilities [R].

    The result is [R, F].
    """

    @staticmethod
    def forward(ctx: Any, gate_up: Tensor, probs_R: Tensor) -> Tensor:
        ctx.save_for_backward(gate_up, probs_R)
        return _weighted_swiglu(gate_up, probs_R)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        inputs = [tensor.detach().requires_grad_() for tensor in ctx.saved_tensors]
        with torch.enable_grad():
            out = _weighted_swiglu(*inputs)
        return torch.autograd.grad(out, inputs, grads[0])


def _weighted_swiglu(gate_up: Tensor, probs_R: Tensor) -> Tensor:
    gate, up = gate_up.chunk(2, -1)
    return (F.silu(gate) * up * probs_R[:, None]).to(gate_up.dtype)
