"""Tables of a ``SampleStore``: memory of the columns, extents in this memory, and rows in the extents."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from slime_like.store.columns import TokenColumns
from slime_like.types import I64

FIRST_SIZE = 16

Bools = npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class ExpertEntry:
    """Shape and dtype of one token's entry in the column of experts."""

    shape: tuple[int, ...]  # [blocks, experts per token]
    dtype: np.dtype[Any]


@dataclass(slots=True, eq=False)
class Slab:
    """Memory of one allocation."""

    columns: TokenColumns  # [size], writable
    num_extents: int  # number of extents of this slab that rows still use

    @staticmethod
    def allocate(size: int, experts: ExpertEntry | None, num_extents: int) -> Slab:
        """Return a slab of uninitialised memory for ``size`` tokens, with zeros as experts. Raises ``MemoryError``."""
        token_ids, logprobs = np.empty(size, dtype=np.int32), np.empty(size, dtype=np.float32)
        rows = None if experts is None else np.zeros((size, *experts.shape), dtype=experts.dtype)
        return Slab(TokenColumns(token_ids, logprobs, np.empty(size, dtype=np.int32), rows), num_extents)


def copy_tokens(source: TokenColumns, first: int, target: TokenColumns, start: int, num_tokens: int) -> None:
    """Copy ``num_tokens`` tokens from position ``first`` of ``source`` to position ``start`` of ``target``.

    Experts are copied if both have them.
    """
    stop, end = first + num_tokens, start + num_tokens
    target.token_ids[start:end] = source.token_ids[first:stop]
    target.logprobs[start:end] = source.logprobs[first:stop]
    target.versions[start:end] = source.versions[first:stop]
    if target.experts is not None and source.experts is not None:
        target.experts[start:end] = source.experts[first:stop]


def _integers() -> I64:
    return np.zeros(FIRST_SIZE, dtype=np.int64)


def _booleans() -> Bools:
    return np.zeros(FIRST_SIZE, dtype=np.bool_)


@dataclass(slots=True)
class ExtentTable:
    """Extents: contiguous ranges of a slab, at whose start one or more rows begin. The first ``used`` entries never change."""

    size: int = 0
    slab: I64 = field(default_factory=_integers)  # key of the slab
    start: I64 = field(default_factory=_integers)  # position of the first entry in the slab
    used: I64 = field(default_factory=_integers)  # number of entries that a row has written
    capacity: I64 = field(default_factory=_integers)
    num_rows: I64 = field(default_factory=_integers)  # reference count

    def add(self, slab: int, starts: I64, capacities: I64) -> I64:
        """Add extents that one row each refers to, and return their ids."""
        ids = np.arange(self.size, self.size + len(starts))
        self.size += len(starts)
        if self.size > len(self.slab):
            for name in ("slab", "start", "used", "capacity", "num_rows"):
                setattr(self, name, grow(getattr(self, name), self.size))
        self.slab[ids], self.start[ids], self.capacity[ids] = slab, starts, capacities
        self.used[ids], self.num_rows[ids] = 0, 1
        return ids


@dataclass(slots=True)
class RowTable:
    """Rows, each of which is the first ``length`` entries of an extent."""

    size: int = 0
    extent: I64 = field(default_factory=_integers)  # -1: released
    length: I64 = field(default_factory=_integers)
    slab: I64 = field(default_factory=_integers)  # slab of the extent
    start: I64 = field(default_factory=_integers)  # start of the extent
    limit: I64 = field(default_factory=_integers)  # length up to which tokens may be appended without a further check
    is_finished: Bools = field(default_factory=_booleans)
    has_experts: Bools = field(default_factory=_booleans)

    def add(self, extent: int, length: int, extents: ExtentTable, *, has_experts: bool, num_rows: int = 1) -> range:
        """Add ``num_rows`` rows of an extent and return their ids."""
        ids = range(self.size, self.size + num_rows)
        self.size += num_rows
        if self.size > len(self.extent):
            for name in ("extent", "length", "slab", "start", "limit", "is_finished", "has_experts"):
                setattr(self, name, grow(getattr(self, name), self.size))
        new = slice(ids.start, ids.stop)
        self.extent[new], self.length[new], self.limit[new] = extent, length, 0
        self.slab[new], self.start[new] = extents.slab[extent], extents.start[extent]
        self.is_finished[new], self.has_experts[new] = False, has_experts
        return ids


def grow[Array: npt.NDArray[Any]](array: Array, size: int) -> Array:
    """Return a copy padded with zeros to at least ``size`` entries and at least twice the length."""
    larger = np.zeros(max(size, 2 * len(array)), dtype=array.dtype)
    larger[: len(array)] = array
    return larger  # pyright: ignore[reportReturnType]
