"""Weighted sums of SwiGLU experts, accumulated in float32. Engine and worker compute their experts with this code.

Axes: N rows (tokens), K selected experts of a row, H hidden, I intermediate, E experts in this memory.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

type Ids = NDArray[np.int32]  # [N, K]; -1: no expert
type Weights = NDArray[np.float32]  # [N, K]
GROUPED_ROWS = 32  # maximum rows of a batch whose experts are computed by two grouped GEMMs
GROUPED_ALIGNMENT = 16  # bytes; torch's grouped GEMMs require it of rows


def nothing() -> None:
    """Do nothing between two experts."""


def expert_sums(
    x_NH: Tensor, ids: Ids, weights: Weights, w13: Tensor, w2: Tensor, between: Callable[[], None] = nothing
) -> Tensor:
    """Return the float32 sums [N, H] of ``weights * expert(x)`` over the experts ``ids``, in the order of the columns.

    ``w13`` [E, 2I, H] has each expert's gate projection followed by its up projection, ``w2`` [E, H, I] its down projection.
    ``between`` is called after each expert, unless all experts are computed at once by grouped GEMMs.
    """
    num_rows, num_selected = ids.shape
    hidden, device = w2.shape[1], w2.device
    flat = ids.reshape(-1)
    order = flat.argsort(kind="stable")
    # Ends in ``order`` of the pairs without an expert, then of the pairs of each expert.
    ends = np.bincount(flat + 1, minlength=len(w13) + 1).cumsum()
    start = int(ends[0])
    pairs, tokens = (_index(indices[start:], device) for indices in (order, order // num_selected))
    x = x_NH.to(device=device, dtype=w13.dtype)
    empty = torch.zeros if start else torch.empty
    out = empty((num_rows * num_selected, hidden), dtype=torch.float32, device=device)
    if num_rows <= GROUPED_ROWS and _supports_groups(w13, w2):
        out.index_copy_(0, pairs, _grouped_products(x.index_select(0, tokens), ends[1:] - start, w13, w2).float())
    elif len(tokens):
        counts = np.diff(ends)
        experts = np.flatnonzero(counts).tolist()
        sizes = counts[experts].tolist()
        for expert, rows, indices in zip(experts, tokens.split(sizes), pairs.split(sizes), strict=True):
            gate, up = F.linear(x.index_select(0, rows), w13[expert]).chunk(2, -1)  # all rows at once would take memory
            out.index_copy_(0, indices, F.linear(F.silu(gate).mul_(up), w2[expert]).float())
            between()
    scale = torch.from_numpy(np.where(ids < 0, np.float32(0), weights)).to(device)
    return out.view(num_rows, num_selected, hidden).mul_(scale[:, :, None]).sum(1)


def _supports_groups(w13: Tensor, w2: Tensor) -> bool:
    """Return True if torch has grouped GEMMs for these matrices."""
    is_aligned = not any(matrix.shape[2] * matrix.itemsize % GROUPED_ALIGNMENT for matrix in (w13, w2))
    return is_aligned and len(w13) > 0 and w13.device.type == "cpu" and hasattr(F, "grouped_mm")


def _grouped_products(x: Tensor, ends: NDArray[np.int64], w13: Tensor, w2: Tensor) -> Tensor:
    """Return the experts' outputs for rows ``x`` that are sorted by expert; ``ends`` [E] is the end of each expert's rows.

    GEMMs of a few rows take less time than their calls from Python. The results are bitwise those of one GEMM per expert.
    """
    offsets = torch.from_numpy(ends.astype(np.int32))
    gate, up = F.grouped_mm(x, w13.transpose(1, 2), offs=offsets).chunk(2, -1)
    return F.grouped_mm(F.silu(gate).mul_(up), w2.transpose(1, 2), offs=offsets)


def _index(indices: NDArray[np.int64], device: torch.device) -> Tensor:
    index: Any = torch.from_numpy(np.ascontiguousarray(indices))
    return index if device.type == "cpu" else index.to(device)
