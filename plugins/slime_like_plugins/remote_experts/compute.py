"""Weighted sums of SwiGLU experts, accumulated in float32.

Workers compute experts with this code, and so do engines on a CPU, and engines that compute the experts of a failed worker.

Axes: N rows (tokens), K selected experts of a row, H hidden, I intermediate, E experts whose weights are passed.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from slime_like_plugins.sglang_cpu.expert_sums import expert_sums_kernel

type Ids = NDArray[np.int32]  # [N, K]; -1: no expert
type Weights = NDArray[np.float32]  # [N, K]
# Maximum rows of a batch that the C kernel computes. It packs no weights, and so is faster than torch for a few rows;
# in bfloat16, some processors have instructions that only torch uses.
KERNEL_ROWS = {torch.float32: 64, torch.bfloat16: 32}


def nothing() -> None:
    """Do nothing between two experts."""


def expert_sums(
    x_NH: Tensor, ids: Ids, weights: Weights, w13: Tensor, w2: Tensor, between: Callable[[], None] = nothing
) -> Tensor:
    """Return the float32 sums [N, H] of ``weights * expert(x)`` over the experts ``ids``, in the order of the columns.

    ``w13`` [E, 2I, H] has each expert's gate projection followed by its up projection, ``w2`` [E, H, I] its down projection.
    ``between`` is called after each expert, unless the C kernel for a few rows computes all of them.
    """
    num_rows, num_selected = ids.shape
    kernel = expert_sums_kernel() if num_rows <= KERNEL_ROWS.get(w13.dtype, -1) else None
    if kernel is not None and kernel.supports(w13, w2):
        return kernel(x_NH, torch.from_numpy(ids), torch.from_numpy(weights), w13, w2)
    hidden, device = w2.shape[1], w2.device
    flat = ids.reshape(-1)
    order = flat.argsort(kind="stable")
    # Positions in ``order`` where the pairs without an expert end, then those of each expert.
    ends = np.bincount(flat + 1, minlength=len(w13) + 1).cumsum()
    start = int(ends[0])
    pairs, tokens = (_index(indices[start:], device) for indices in (order, order // num_selected))
    x = x_NH.to(device=device, dtype=w13.dtype)
    empty = torch.zeros if start else torch.empty
    out = empty((num_rows * num_selected, hidden), dtype=torch.float32, device=device)
    if len(tokens):
        counts = np.diff(ends)
        experts = np.flatnonzero(counts).tolist()
        sizes = counts[experts].tolist()
        for expert, rows, indices in zip(experts, tokens.split(sizes), pairs.split(sizes), strict=True):
            gate, up = F.linear(x.index_select(0, rows), w13[expert]).chunk(2, -1)  # of one expert, to save memory
            out.index_copy_(0, indices, F.linear(F.silu(gate).mul_(up), w2[expert]).float())
            between()
    scale = torch.from_numpy(np.where(ids < 0, np.float32(0), weights)).to(device)
    return out.view(num_rows, num_selected, hidden).mul_(scale[:, :, None]).sum(1)


def _index(indices: NDArray[np.int64], device: torch.device) -> Tensor:
    index: Any = torch.from_numpy(np.ascontiguousarray(indices))
    return index if device.type == "cpu" else index.to(device)
