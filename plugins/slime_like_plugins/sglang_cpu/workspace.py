"""What the layers of a forward write into: memory that is used again by the next layer and the next forward."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

KEPT_ROWS = 1024  # most rows that memory is held for; a longer prefill takes its own and gives it back


class Workspace:
    """Tensors of as many rows as are asked for, and of these widths."""

    def __init__(self, widths: Sequence[int]) -> None:
        self._widths = tuple(widths)
        self._memory: tuple[Tensor, ...] = ()

    def __call__(self, rows: int, dtype: torch.dtype) -> tuple[Tensor, ...]:
        """[rows, width] each; overwritten by whoever asks next."""
        if self._memory and len(self._memory[0]) >= rows and self._memory[0].dtype is dtype:
            return tuple(tensor[:rows] for tensor in self._memory)
        made = tuple(torch.empty(rows, columns, dtype=dtype) for columns in self._widths)
        if rows <= KEPT_ROWS:
            self._memory = made
        return made
