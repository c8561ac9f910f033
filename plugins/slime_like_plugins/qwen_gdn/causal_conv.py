"""Depthwise causal convolution over packed sequences in torch, with a hand-written backward."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from slime_like_plugins.qwen_gdn.packing import lengths


@dataclass(frozen=True, slots=True)
class _Grid:
    """Row positions of packed sequences, with W-1 extra rows before each, so that no window reaches into the previous one."""

    num_positions: int  # R: tokens and extra rows
    token: Tensor  # I64 [tokens] position of each token
    halo: Tensor  # I64 [N * (W - 1)] positions of the extra rows


def causal_conv(
    x: Tensor,
    weight: Tensor,
    *,
    cu_seqlens_cpu: Tensor,
    activation: str | None = "silu",
    halo: Tensor | None = None,
) -> Tensor:
    """Convolve as ``backend.GDNBackend.causal_conv`` describes. 16-bit inputs are accumulated in float32.

    Raises ``ValueError`` if the activation is not supported, the shapes of ``x`` and ``weight`` do not fit, or
    ``packing.lengths`` rejects the bounds.
    """
    if activation not in ("silu", None):
        raise ValueError(f"activation={activation!r} is not silu or None")
    if x.dim() != 3 or x.shape[0] != 1 or weight.shape[0] != x.shape[2]:
        raise ValueError(f"x {tuple(x.shape)} and weight {tuple(weight.shape)} must be [1, T, D] and [D, W]")
    rows, width = x[0], weight.shape[1]
    grid = _grid(lengths(cu_seqlens_cpu, len(rows)), width, x.device)
    return _CausalConv.apply(rows, weight, halo, grid, activation == "silu").unsqueeze(0)  # pyright: ignore[reportOptionalMemberAccess]


@functools.lru_cache(maxsize=16)
def _grid(lengths_N: tuple[int, ...], width: int, device: torch.device) -> _Grid:
    history = width - 1
    row, halo, position = [torch.empty(0, dtype=torch.int64)], [torch.empty(0, dtype=torch.int64)], 0
    for length in lengths_N:
        halo.append(torch.arange(position, position + history))
        row.append(torch.arange(position + history, position + history + length))
        position += history + length
    return _Grid(position, torch.cat(row).to(device), torch.cat(halo).to(device))


class _CausalConv(torch.autograd.Function):
    """Convolution as ``W`` shifted multiply-adds over the grid.

    It saves the sums before the activation for backward.
    """

    @staticmethod
    def forward(ctx: Any, rows: Tensor, weight: Tensor, halo: Tensor | None, grid: _Grid, silu: bool) -> Tensor:
        dtype = torch.promote_types(rows.dtype, torch.float32)
        padded_rows = rows.new_zeros(grid.num_positions, rows.shape[1], dtype=dtype)
        padded_rows.index_copy_(0, grid.token, rows[: len(grid.token)].to(dtype))
        if halo is not None:
            padded_rows.index_copy_(0, grid.halo, halo.flatten(0, 1).to(dtype))
        taps, width = weight.to(dtype).T.contiguous(), weight.shape[1]
        windows = max(len(padded_rows) - width + 1, 0)
        sums = padded_rows[:windows] * taps[0]
        for tap in range(1, width):
            sums.addcmul_(padded_rows[tap : tap + windows], taps[tap])
        ctx.save_for_backward(padded_rows, taps, sums)
        ctx.grid, ctx.silu = grid, silu
        ctx.dtypes = (rows.dtype, weight.dtype, None if halo is None else halo.dtype)
        ctx.halo_shape = None if halo is None else halo.shape
        out = torch.zeros_like(rows)
        row_sums = sums.index_select(0, grid.token - (width - 1))
        out[: len(grid.token)] = F.silu(row_sums) if silu else row_sums
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        padded_rows, taps, sums = ctx.saved_tensors
        grid, width = ctx.grid, len(taps)
        rows_dtype, weight_dtype, halo_dtype = ctx.dtypes
        dsums = torch.zeros_like(sums)
        dsums.index_copy_(0, grid.token - (width - 1), grads[0][: len(grid.token)].to(sums.dtype))
        if ctx.silu:
            dsums = torch.ops.aten.silu_backward(dsums, sums)
        windows = len(sums)
        dpadded_rows, dtaps = torch.zeros_like(padded_rows), torch.empty_like(taps)
        for tap in range(width):
            dpadded_rows[tap : tap + windows].addcmul_(dsums, taps[tap])
            torch.sum(padded_rows[tap : tap + windows] * dsums, 0, out=dtaps[tap])
        drows = torch.zeros_like(grads[0], dtype=rows_dtype)
        drows[: len(grid.token)] = dpadded_rows.index_select(0, grid.token)
        dhalo = None
        if halo_dtype is not None:
            dhalo = dpadded_rows.index_select(0, grid.halo).view(ctx.halo_shape).to(halo_dtype)
        return drows, dtaps.T.to(weight_dtype), dhalo, None, None
