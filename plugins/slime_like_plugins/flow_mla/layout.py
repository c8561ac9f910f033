"""Layout of the sharded matrices of one layer in a buffer of bytes, and the part of each rank.

Matrices follow each other at aligned offsets, and the buffer is padded so that all parts are equal and aligned. Rank ``r`` of
``dp`` holds bytes ``[r * n / dp, (r + 1) * n / dp)`` of the ``n`` bytes, so one all-gather of the parts restores the layer.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

ALIGNMENT = 64
"""Alignment of matrices and of ranks' parts, in bytes."""


@dataclass(frozen=True, slots=True)
class Matrix:
    """A matrix of a layer, dense in memory; its strides give the order of its axes."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype

    @property
    def num_bytes(self) -> int:
        """Size in bytes."""
        return math.prod(self.shape) * self.dtype.itemsize


def matrix(tensor: Tensor) -> Matrix:
    """Return shape, strides and dtype of ``tensor`` as a ``Matrix``."""
    return Matrix(tuple(tensor.shape), tuple(tensor.stride()), tensor.dtype)


@dataclass(frozen=True, slots=True)
class LayerLayout:
    """Offsets of a layer's matrices in a buffer of bytes, of which each of ``num_ranks`` ranks holds a part."""

    matrices: tuple[Matrix, ...]
    offsets: tuple[int, ...]  # byte of the buffer at which each matrix begins
    num_bytes: int  # size of the buffer, padded
    num_ranks: int

    @property
    def part_bytes(self) -> int:
        """Size of each rank's part."""
        return self.num_bytes // self.num_ranks

    def view(self, buffer: Tensor, index: int) -> Tensor:
        """Return matrix ``index`` as a view of ``buffer``, the bytes of the whole layer."""
        item, offset = self.matrices[index], self.offsets[index]
        flat = buffer[offset : offset + item.num_bytes].view(item.dtype)
        return flat.as_strided(item.shape, item.stride)

    def part_of(self, part: Tensor, rank: int, index: int) -> Tensor:
        """Return the elements of matrix ``index`` in ``part``, the part of ``rank``: a one-dimensional view, possibly empty."""
        item, offset, start = self.matrices[index], self.offsets[index], rank * self.part_bytes
        begin = min(max(offset - start, 0), self.part_bytes)
        end = min(max(offset + item.num_bytes - start, 0), self.part_bytes)
        return part[begin:end].view(item.dtype)


def layer_layout(matrices: Sequence[Matrix], num_ranks: int) -> LayerLayout:
    """Return the layout of one layer's ``matrices``."""
    offsets: list[int] = []
    end = 0
    for item in matrices:
        offsets.append(end)
        end += _padded(item.num_bytes, ALIGNMENT)
    return LayerLayout(tuple(matrices), tuple(offsets), _padded(end, ALIGNMENT * num_ranks), num_ranks)


@dataclass(frozen=True, slots=True)
class FlowBytes:
    """Sizes in bytes of a rank's sharded weights; the whole weights have W bytes in L layers."""

    full: int  # W, without sharding
    private: int  # W / dp, plus padding
    slots: int  # 2 W / L for two slots and equal layers, plus padding
    loading: int  # private, plus the largest layer


def slot_sizes(layers: Sequence[LayerLayout], num_slots: int) -> list[int]:
    """Return the bytes of each slot: the size of the largest layer that uses it. There are at most as many slots as layers."""
    num_slots = min(num_slots, len(layers))
    return [max(layer.num_bytes for layer in layers[slot::num_slots]) for slot in range(num_slots)]


def flow_bytes(layers: Sequence[LayerLayout], num_slots: int) -> FlowBytes:
    """Return the sizes of a rank's sharded weights if ``layers`` share ``num_slots`` slots."""
    private = sum(layer.part_bytes for layer in layers)
    return FlowBytes(
        full=sum(item.num_bytes for layer in layers for item in layer.matrices),
        private=private,
        slots=sum(slot_sizes(layers, num_slots)),
        loading=private + max(layer.num_bytes for layer in layers),
    )


def _padded(size: int, multiple: int) -> int:
    return -(-size // multiple) * multiple
