"""Copies of a rank's weights in host memory: pinned if the weights are on a GPU, and filled without waiting for each weight."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch
from torch import Tensor

CHUNK_BYTES = 1 << 28  # a power of two: torch rounds each pinned block up to one
ALIGNMENT = 256


def copy_to_host(weights: Iterable[tuple[str, Tensor]], buffers: dict[str, Tensor] | None = None) -> dict[str, Tensor]:
    """Return host copies of the weights, by key. ``buffers``, an earlier result for the same weights, is overwritten."""
    pairs = list(weights)
    buffers = host_buffers(pairs) if buffers is None else buffers
    for key, weight in pairs:
        buffers[key].copy_(weight.detach(), non_blocking=True)
    if any(weight.is_cuda for _, weight in pairs):
        torch.cuda.current_stream().synchronize()
    return buffers


@torch.no_grad()
def copy_from_host(weights: Iterable[tuple[str, Tensor]], copies: dict[str, Tensor]) -> None:
    """Set the weights to ``copies``, which must not change before the device has read them."""
    for key, weight in weights:
        weight.copy_(copies[key], non_blocking=True)


def host_buffers(weights: Iterable[tuple[str, Tensor]]) -> dict[str, Tensor]:
    """Return an uninitialised host tensor for each weight, by key. Those of GPU weights share pinned blocks (``_groups``)."""
    pairs = list(weights)
    if not any(weight.is_cuda for _, weight in pairs):
        return {key: torch.empty_like(weight, device="cpu", requires_grad=False) for key, weight in pairs}
    out: dict[str, Tensor] = {}
    for group in _groups(pairs):
        total = sum(_padded(weight) for _, weight in group)
        block = torch.empty(total, dtype=torch.uint8, pin_memory=True)
        start = 0
        for key, weight in group:
            num_bytes = weight.numel() * weight.element_size()
            out[key] = block[start : start + num_bytes].view(weight.dtype).view(weight.shape)
            start += _padded(weight)
    return out


def _groups(pairs: list[tuple[str, Tensor]]) -> Iterator[list[tuple[str, Tensor]]]:
    """Divide the weights into groups of at most ``CHUNK_BYTES``; a larger weight is a group of its own."""
    group: list[tuple[str, Tensor]] = []
    size = 0
    for key, weight in pairs:
        if group and size + _padded(weight) > CHUNK_BYTES:
            yield group
            group, size = [], 0
        group.append((key, weight))
        size += _padded(weight)
    if group:
        yield group


def _padded(weight: Tensor) -> int:
    return -(-weight.numel() * weight.element_size() // ALIGNMENT) * ALIGNMENT
