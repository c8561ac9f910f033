"""Batched inverse of small unit lower triangular matrices."""

from __future__ import annotations

import torch
from torch import Tensor

BASE = 8


def unit_lower_inverse(lower: Tensor) -> Tensor:
    """Return ``(I + strict lower part of lower)^-1`` for ``lower`` [m, C, C], C a power of two or at most ``BASE``.

    Diagonal blocks of size ``BASE`` are inverted by forward substitution. Then neighbouring inverses A' and D' are merged:
    [[A, 0], [B, D]]^-1 = [[A', 0], [-D' B A', D']]. For the matrices of the delta rule, the inverses of diagonal blocks stay
    small. The Neumann series in powers of ``lower`` would overflow for similar keys.
    """
    m, size, _ = lower.shape
    base = min(BASE, size)
    num_blocks = size // base
    diagonal = _diagonal_blocks(lower, base)
    inverse = torch.eye(base, dtype=lower.dtype, device=lower.device).repeat(m * num_blocks, 1, 1)
    for row in range(1, base):
        inverse[:, row, :row] = -torch.bmm(diagonal[:, row : row + 1, :row], inverse[:, :row, :row]).squeeze(1)
    while base < size:
        num_blocks //= 2
        pairs = inverse.view(m * num_blocks, 2, base, base)
        below = _diagonal_blocks(lower, 2 * base)[:, base:, :base]
        inverse = lower.new_zeros(m * num_blocks, 2 * base, 2 * base)
        inverse[:, :base, :base] = pairs[:, 0]
        inverse[:, base:, base:] = pairs[:, 1]
        inverse[:, base:, :base] = torch.bmm(torch.bmm(pairs[:, 1], below), pairs[:, 0]).neg_()
        base *= 2
    return inverse.view(m, size, size)


def _diagonal_blocks(matrix: Tensor, size: int) -> Tensor:
    """Return the diagonal blocks [m * C / size, size, size] of ``matrix`` [m, C, C]."""
    m, width, _ = matrix.shape
    num_blocks = width // size
    return matrix.view(m, num_blocks, size, num_blocks, size).diagonal(dim1=1, dim2=3).permute(0, 3, 1, 2).flatten(0, 1)
