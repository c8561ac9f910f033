"""The compiled kernel that samples plain batches, if the platform has one."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

type SamplingKernel = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], tuple[Tensor, Tensor] | None]

_selected: list[SamplingKernel] = []


def select(kernel: SamplingKernel | None) -> None:
    """Sample plain batches with ``kernel(logits, temperatures, top_k, seeds, positions)``, or with torch if it is ``None``.

    The kernel must sample the same tokens as ``hooks.draw``, or return ``None`` to leave the batch to torch.
    """
    _selected[:] = [] if kernel is None else [kernel]


def selected() -> SamplingKernel | None:
    """Return the current sampling kernel, or ``None``."""
    return _selected[0] if _selected else None
