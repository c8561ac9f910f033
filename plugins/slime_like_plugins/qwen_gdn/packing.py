"""Packed sequences in chunks, ordered so that one batched GEMM computes a step of every sequence."""

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
    """M chunks of C tokens, sorted by their index within their sequence, then by sequence, longest first.

    Step t holds the t-th chunk of each sequence that is long enough: the first ``counts[t]`` of ``sequences``. A scan over
    the steps is therefore as long as the longest sequence, however many sequences there are.
    """

    chunk: int  # C
    num_rows: int  # T, padding included
    sequences: tuple[int, ...]  # [N] index of each sequence, longest first
    counts: tuple[int, ...]  # number of chunks of each step
    starts: tuple[int, ...]  # [steps + 1] index of the first chunk of each step
    num_tokens: int  # rows without padding
    source: Tensor | None  # I64 [M * C] row of each position, 0 in gaps; None: rows keep their order
    gaps: Tensor | None  # I64 [M * C - num_tokens] positions without a row
    position: Tensor | None  # I64 [num_tokens] position of each row

    @property
    def num_chunks(self) -> int:
        """Number of chunks M."""
        return self.starts[-1]

    def pack(self, rows: Tensor) -> Tensor:
        """Return rows [T, heads, D] as chunks [M, heads, C, D], as a view if possible. Gaps are 0."""
        if self.source is not None and self.gaps is not None:
            rows = rows.index_select(0, self.source).index_fill_(0, self.gaps, 0)
        return rows.unflatten(0, (self.num_chunks, self.chunk)).transpose(1, 2)

    def unpack(self, chunks: Tensor) -> Tensor:
        """Return chunks [M, heads, C, D] as rows [T, heads, D]. Padding is 0."""
        rows = chunks.transpose(1, 2).flatten(0, 1)
        if self.position is None:
            return rows
        unpacked_rows = rows.new_empty(self.num_rows, *rows.shape[1:])
        torch.index_select(rows, 0, self.position, out=unpacked_rows[: self.num_tokens])
        unpacked_rows[self.num_tokens :] = 0
        return unpacked_rows

    def chunks_of(self, steps: range) -> slice:
        """Return the slice of chunks that belong to consecutive ``steps``."""
        return slice(self.starts[steps.start], self.starts[steps.stop])

    def blocks(self, heads: int, max_matrices: int) -> Iterator[range]:
        """Yield ranges of steps with at most ``max_matrices`` (chunk, head) matrices, so that they fit in the cache.

        A single step may have more.
        """
        first, num_matrices = 0, 0
        for step, count in enumerate(self.counts):
            if num_matrices and num_matrices + count * heads > max_matrices:
                yield range(first, step)
                first, num_matrices = step, 0
            num_matrices += count * heads
        if num_matrices:
            yield range(first, len(self.counts))


def lengths(cu_seqlens_cpu: Tensor, num_rows: int) -> tuple[int, ...]:
    """Return the length of each sequence.

    Raises ``ValueError`` unless the bounds are a vector on the host that starts at 0, never decreases and ends within the rows.
    """
    if cu_seqlens_cpu.device.type != "cpu" or cu_seqlens_cpu.dim() != 1 or cu_seqlens_cpu.numel() < 1:
        raise ValueError(f"cu_seqlens_cpu must be a vector [N+1] on the host, not {cu_seqlens_cpu!r}")
    bounds: list[int] = cu_seqlens_cpu.tolist()
    sizes = tuple(stop - start for start, stop in pairwise(bounds))
    if bounds[0] != 0 or min(sizes, default=0) < 0 or bounds[-1] > num_rows:
        raise ValueError(f"cu_seqlens={bounds} must start at 0, never decrease and end within the {num_rows} rows")
    return sizes


def num_tokens(cu_seqlens_cpu: Tensor, num_rows: int) -> int:
    """Return the number of rows that are not padding. Raises the ``ValueError`` of ``lengths``."""
    return sum(lengths(cu_seqlens_cpu, num_rows))


def padded(rows: Tensor, num_rows: int) -> Tensor:
    """Return ``rows`` [1, t, ...] followed by zero rows: [1, num_rows, ...]."""
    return F.pad(rows, (0, 0) * (rows.dim() - 2) + (0, num_rows - rows.shape[1]))


def zero_of(*parts: Tensor | None) -> Tensor:
    """Return 0 as a float32 scalar for autograd: backward gives each of ``parts`` a gradient of 0, even if it contains NaN."""
    return torch.stack([part[:0].sum(dtype=torch.float32) for part in parts if part is not None]).sum()


def chunk_order(cu_seqlens_cpu: Tensor, num_rows: int, chunk: int, device: torch.device) -> ChunkOrder:
    """Return the order of the chunks of packed sequences, cached for the other layers of a micro-batch."""
    return _chunk_order(lengths(cu_seqlens_cpu, num_rows), num_rows, chunk, device)


@functools.lru_cache(maxsize=16)
def _chunk_order(lengths_N: tuple[int, ...], num_rows: int, chunk: int, device: torch.device) -> ChunkOrder:
    sequences = tuple(sorted(range(len(lengths_N)), key=lambda n: (-lengths_N[n], n)))
    chunks = [-(-lengths_N[n] // chunk) for n in sequences]
    counts = tuple(sum(1 for c in chunks if c > step) for step in range(max(chunks, default=0)))
    starts = tuple(accumulate(counts, initial=0))
    first_row = list(accumulate(lengths_N, initial=0))
    num_tokens, size = first_row[-1], starts[-1] * chunk
    position = torch.empty(num_tokens, dtype=torch.int64)
    base = torch.tensor(starts, dtype=torch.int64) * chunk
    for index, n in enumerate(sequences):
        token = torch.arange(lengths_N[n])
        position[first_row[n] : first_row[n + 1]] = base[token // chunk] + index * chunk + token % chunk
    source = torch.full((size,), -1, dtype=torch.int64)
    source[position] = torch.arange(num_tokens)
    gaps = (source < 0).nonzero().squeeze(1)
    is_plain = size == num_rows == num_tokens and bool((position == torch.arange(num_rows)).all())
    return ChunkOrder(
        chunk=chunk,
        num_rows=num_rows,
        sequences=sequences,
        counts=counts,
        starts=starts,
        num_tokens=num_tokens,
        source=None if is_plain else source.clamp_min(0).to(device),
        gaps=None if is_plain else gaps.to(device),
        position=None if is_plain else position.to(device),
    )
