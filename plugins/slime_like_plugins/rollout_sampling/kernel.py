"""Registry of the platform's sampling kernel, for batches in which no request uses top-k, nucleus or min-p sampling."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

type SamplingKernel = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], tuple[Tensor, Tensor] | None]

_selected: list[SamplingKernel] = []


def select(kernel: SamplingKernel | None) -> None:
    """Set the kernel for batches in which no request uses top-k, nucleus or min-p sampling; None to sample them in torch.

    The kernel is called as ``kernel(logits, temperatures, top_k, seeds, positions)``; requests with ``top_k`` 1 are greedy.
    It must return the tokens that ``hooks.choose`` would return and their log-probabilities, or None to leave the batch to torch.
    """
    _selected[:] = [] if kernel is None else [kernel]


def selected() -> SamplingKernel | None:
    """Return the current sampling kernel; None if there is none."""
    return _selected[0] if _selected else None
