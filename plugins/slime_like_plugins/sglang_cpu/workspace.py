"""Output buffers of layers, reused by the next layer and the next forward."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

MAX_CACHED_ROWS = 1024  # a longer prefill allocates its buffers and frees them


class Workspace:
    """Reusable tensors of given widths, for any number of rows."""

    def __init__(self, widths: Sequence[int]) -> None:
        self._widths = tuple(widths)
        self._memory: tuple[Tensor, ...] = ()

    def __call__(self, rows: int, dtype: torch.dtype) -> tuple[Tensor, ...]:
        """Return uninitialised tensors [rows, width]; the next call may reuse their memory."""
        if self._memory and len(self._memory[0]) >= rows and self._memory[0].dtype is dtype:
            return tuple(tensor[:rows] for tensor in self._memory)
        buffers = tuple(torch.empty(rows, columns, dtype=dtype) for columns in self._widths)
        if rows <= MAX_CACHED_ROWS:
            self._memory = buffers
        return buffers
