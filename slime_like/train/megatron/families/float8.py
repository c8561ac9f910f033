"""Multiplication of float8 weights by their scales."""

from __future__ import annotations

import torch
from torch import Tensor


def dequantise(weight: Tensor, scales: Tensor, block: tuple[int, int] | None) -> Tensor:
    """Return ``weight`` [..., R, C] times its scales, in float32.

    ``scales`` [..., ceil(R / block[0]), ceil(C / block[1])] has one scale per block or, if ``block`` is None, one per matrix.
    If all blocks are complete, the values equal those of transformers' ``Fp8Dequantize`` before it casts them.
    """
    rows, columns = block or weight.shape[-2:]
    out = weight.to(torch.float32)
    grid = scales.to(torch.float32).reshape(*weight.shape[:-2], -(-weight.shape[-2] // rows), -1)
    for i in range(grid.shape[-2]):  # one row of blocks at a time, so that no second matrix of this size is needed
        by_column = grid[..., i : i + 1, :].repeat_interleave(columns, -1)[..., : weight.shape[-1]]
        out[..., i * rows : (i + 1) * rows, :].mul_(by_column)
    return out
