"""Packed sequences cut into chunks, ordered so that one batched product serves a step of every sequence."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import accumulate, pairwise

import torch
import torch.nn.functional as F
from torch import Tensor


@dataclass(frozen=True, slots=True)
class ChunkOrder:
    """Chunks of C tokens, first by their number within their sequence, then by the sequence, longest first.

    Step t holds the t-th chunk of each sequence that has one, and these are the first ``counts[t]`` of ``sequences``:
    a scan over the steps is as long as the longest sequence, however many are packed. M chunks in all.
    """

    chunk: int  # C
    num_rows: int  # T, padding included
    sequences: tuple[int, ...]  # [N] longest first
    counts: tuple[int, ...]  # per step
    starts: tuple[int, ...]  # [steps + 1] number of the first chunk of each step
    num_tokens: int  # rows that are no padding
    source: Tensor | None  # I64 [M * C] row of each place, 0 in gaps; None: the rows as they are
    gaps: Tensor | None  # I64 [M * C - num_tokens] places without a row
    place: Tensor | None  # I64 [num_tokens] place of each row

    @property
    def num_chunks(self) -> int:
        """M."""
        return self.starts[-1]

    def pack(self, rows: Tensor) -> Tensor:
        """[T, heads, D] -> [M, heads, C, D], a view where it can be; places without a row hold 0."""
        if self.source is not None and self.gaps is not None:
            rows = rows.index_select(0, self.source).index_fill_(0, self.gaps, 0)
        return rows.unflatten(0, (self.num_chunks, self.chunk)).transpose(1, 2)

    def unpack(self, chunks: Tensor) -> Tensor:
        """[M, heads, C, D] -> [T, heads, D]; padding is 0."""
        rows = chunks.transpose(1, 2).flatten(0, 1)
        if self.place is None:
            return rows
        unpacked = rows.new_empty(self.num_rows, *rows.shape[1:])
        torch.index_select(rows, 0, self.place, out=unpacked[: self.num_tokens])
        unpacked[self.num_tokens :] = 0
        return unpacked

    def within(self, steps: range) -> slice:
        """The chunks of a run of steps."""
        return slice(self.starts[steps.start], self.starts[steps.stop])

    def blocks(self, heads: int, max_matrices: int) -> Iterator[range]:
        """Runs of steps of about ``most`` (chunk, head) matrices: what is computed together stays in the cache."""
        first, matrices = 0, 0
        for step, count in enumerate(self.counts):
            if matrices and matrices + count * heads > max_matrices:
                yield range(first, step)
                first, matrices = step, 0
            matrices += count * heads
        if matrices:
            yield range(first, len(self.counts))


def lengths(cu_seqlens_cpu: Tensor, num_rows: int) -> tuple[int, ...]:
    """Length of each sequence. Raises ``ValueError`` unless the bounds start at 0, never fall and end within the rows."""
    if cu_seqlens_cpu.device.type != "cpu" or cu_seqlens_cpu.dim() != 1 or cu_seqlens_cpu.numel() < 1:
        raise ValueError(f"cu_seqlens_cpu must be a vector [N+1] on the host, not {cu_seqlens_cpu!r}")
    bounds: list[int] = cu_seqlens_cpu.tolist()
    sizes = tuple(stop - start for start, stop in pairwise(bounds))
    if bounds[0] != 0 or min(sizes, default=0) < 0 or bounds[-1] > num_rows:
        raise ValueError(f"cu_seqlens={bounds} must start at 0, never fall and end at most at the {num_rows} rows")
    return sizes


def num_tokens(cu_seqlens_cpu: Tensor, num_rows: int) -> int:
    """Rows that are no padding. Raises ``ValueError`` as ``lengths`` does."""
    return sum(lengths(cu_seqlens_cpu, num_rows))


def padded(rows: Tensor, num_rows: int) -> Tensor:
    """[1, t, ...] -> [1, num_rows, ...], with zeros after the rows."""
    return F.pad(rows, (0, 0) * (rows.dim() - 2) + (0, num_rows - rows.shape[1]))


def chunk_order(cu_seqlens_cpu: Tensor, num_rows: int, chunk: int, device: torch.device) -> ChunkOrder:
    """The order of the chunks of packed sequences; kept for the next layers of the same micro-batch."""
    return _chunk_order(lengths(cu_seqlens_cpu, num_rows), num_rows, chunk, device)


@functools.lru_cache(maxsize=16)
def _chunk_order(lengths_N: tuple[int, ...], num_rows: int, chunk: int, device: torch.device) -> ChunkOrder:
    sequences = tuple(sorted(range(len(lengths_N)), key=lambda n: (-lengths_N[n], n)))
    chunks = [-(-lengths_N[n] // chunk) for n in sequences]
    counts = tuple(sum(1 for c in chunks if c > step) for step in range(max(chunks, default=0)))
    starts = tuple(accumulate(counts, initial=0))
    first_row = list(accumulate(lengths_N, initial=0))
    num_tokens, size = first_row[-1], starts[-1] * chunk
    place = torch.empty(num_tokens, dtype=torch.int64)
    base = torch.tensor(starts, dtype=torch.int64) * chunk
    for rank, n in enumerate(sequences):
        token = torch.arange(lengths_N[n])
        place[first_row[n] : first_row[n + 1]] = base[token // chunk] + rank * chunk + token % chunk
    source = torch.full((size,), -1, dtype=torch.int64)
    source[place] = torch.arange(num_tokens)
    gaps = (source < 0).nonzero().squeeze(1)
    plain = size == num_rows == num_tokens and bool((place == torch.arange(num_rows)).all())
    return ChunkOrder(
        chunk=chunk,
        num_rows=num_rows,
        sequences=sequences,
        counts=counts,
        starts=starts,
        num_tokens=num_tokens,
        source=None if plain else source.clamp_min(0).to(device),
        gaps=None if plain else gaps.to(device),
        place=None if plain else place.to(device),
    )
