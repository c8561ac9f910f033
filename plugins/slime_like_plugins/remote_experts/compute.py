"""Weighted sums of SwiGLU experts, added in float32. Engine and worker compute their experts with this code.

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


def nothing() -> None:
    """Do nothing between two experts."""


def expert_sums(
    x_NH: Tensor, ids: Ids, weights: Weights, w13: Tensor, w2: Tensor, between: Callable[[], None] = nothing
) -> Tensor:
    """Return the float32 sums [N, H] of ``weights * expert(x)`` over the experts ``ids``, in the order of the columns.

    ``w13`` [E, 2I, H] has the gate over the up projection of each expert, ``w2`` [E, H, I] the down projection. ``between`` is
    called after each expert.
    """
    num_rows, num_selected = ids.shape
    hidden, device = w2.shape[1], w2.device
    flat = ids.reshape(-1)
    out = torch.empty((num_rows * num_selected, hidden), dtype=torch.float32, device=device)
    order = np.argsort(flat, kind="stable")
    start = int(np.searchsorted(flat[order], 0))
    counts = np.bincount(flat[order[start:]], minlength=1)
    pairs = _index(order, device)
    tokens = pairs // num_selected
    if start:
        out[pairs[:start]] = 0.0
    x = x_NH.to(device=device, dtype=w13.dtype)
    for expert in np.flatnonzero(counts).tolist():
        end = start + int(counts[expert])
        gate, up = F.linear(x.index_select(0, tokens[start:end]), w13[expert]).chunk(2, -1)
        product = F.linear(F.silu(gate).mul_(up), w2[expert])
        out.index_copy_(0, pairs[start:end], product.float())
        start = end
        between()
    scale = torch.from_numpy(np.ascontiguousarray(np.where(ids < 0, 0, weights), dtype=np.float32)).to(device)
    return out.view(num_rows, num_selected, hidden).mul_(scale[:, :, None]).sum(1)


def _index(indices: NDArray[np.int64], device: torch.device) -> Tensor:
    index: Any = torch.from_numpy(np.ascontiguousarray(indices))
    return index if device.type == "cpu" else index.to(device)
