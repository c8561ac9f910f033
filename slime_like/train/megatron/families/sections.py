"""Weights that consist of several sections, each split over the tensor parallel ranks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from slime_like.train.megatron.families.base import QKV, Weight


def _shard(sections: Sequence[Tensor], tp: int, rank: int) -> Tensor:
    return torch.cat([section.chunk(tp, 0)[rank] for section in sections], 0)


def _join(shards: Sequence[Tensor], rows: Sequence[int]) -> list[Tensor]:
    """Return the complete sections from the shards of all ranks; section i has ``rows[i]`` rows."""
    parts = zip(*(shard.split([n // len(shards) for n in rows], 0) for shard in shards), strict=True)
    return [torch.cat(part, 0) for part in parts]


@dataclass(frozen=True, slots=True)
class Sections(Weight):
    """HF tensors whose concatenated rows form sections, such as query, key and value; section i has ``rows[i]`` rows."""

    rows: tuple[int, ...]

    def split(self, tensors: Sequence[Tensor], tp: int, rank: int) -> Tensor:
        return _shard([part for tensor in self._by_tensor(tensors) for part in tensor], tp, rank)

    def _by_tensor(self, tensors: Sequence[Tensor]) -> list[tuple[Tensor, ...]]:
        """Split each tensor into its sections."""
        out: list[tuple[Tensor, ...]] = []
        rows = list(self.rows)
        for tensor in tensors:
            count = next(n for n in range(1, len(rows) + 1) if sum(rows[:n]) == tensor.shape[0])
            out.append(tensor.split(rows[:count], 0))
            rows = rows[count:]
        return out

    def merge(self, shards: Sequence[Tensor]) -> tuple[Tensor, ...]:
        return torch.cat(_join(shards, self.rows), 0).split([shape[0] for shape in self.shapes], 0)


@dataclass(frozen=True, slots=True)
class InterleavedByHead(Weight):
    """HF tensors that interleave their sections by key head. Section j of tensor i has ``rows[i][j]`` rows per head.

    Qwen3-Next stores query, key, value and gate of key head 0, then those of key head 1, and so on.
    """

    heads: int
    rows: tuple[tuple[int, ...], ...]

    def split(self, tensors: Sequence[Tensor], tp: int, rank: int) -> Tensor:
        by_head = [t.unflatten(0, (self.heads, -1)).split(rows, 1) for t, rows in zip(tensors, self.rows, strict=True)]
        return _shard([part.flatten(0, 1) for parts in by_head for part in parts], tp, rank)

    def merge(self, shards: Sequence[Tensor]) -> tuple[Tensor, ...]:
        sections = iter(_join(shards, [self.heads * n for rows in self.rows for n in rows]))
        return tuple(
            torch.cat([next(sections).unflatten(0, (self.heads, n)) for n in rows], 1).flatten(0, 1)
            for rows in self.rows
        )


@dataclass(frozen=True, slots=True)
class GatedQKV(QKV):
    """``QKV`` with an output gate. A query group has q heads, their gates, k, v; HF stores each q head before its gate."""

    def split(self, tensors: Sequence[Tensor], tp: int, rank: int) -> Tensor:
        queries, key, value = (t.unflatten(0, (self.groups, -1)) for t in tensors)
        query, gate = queries.unflatten(1, (-1, 2, key.shape[1])).unbind(2)
        by_group = torch.cat([query.flatten(1, 2), gate.flatten(1, 2), key, value], 1)
        return by_group.chunk(tp, 0)[rank].flatten(0, 1)

    def merge(self, shards: Sequence[Tensor]) -> tuple[Tensor, ...]:
        by_group = torch.cat(list(shards), 0).unflatten(0, (self.groups, -1))
        width = self.shapes[1][0] // self.groups
        heads = self.shapes[0][0] // self.groups // 2
        query, gate, key, value = by_group.split([heads, heads, width, width], 1)
        pairs = torch.stack([x.unflatten(1, (-1, width)) for x in (query, gate)], 2)
        return pairs.flatten(0, 3), key.flatten(0, 1), value.flatten(0, 1)
