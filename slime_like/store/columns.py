"""Columns of the rows of a store, and the memory and tables in which the store keeps them.

A row is a sequence of tokens. Its columns are token ids, log-probabilities, weight versions and routed experts, with one entry
per token.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from slime_like.types import F32, I32, I64, RoutedExperts, Source, Span

PROMPT_TOKEN, TOOL_TOKEN = -1, -2
"""Entries of ``TokenColumns.versions`` for tokens that were not sampled. Versions of sampled tokens are 0 or more."""


@dataclass(frozen=True, slots=True)
class TokenColumns:
    """Columns of L tokens."""

    token_ids: I32  # [L]
    logprobs: F32  # [L], nan if the token was not sampled
    versions: I32  # [L], weight version that sampled the token, or PROMPT_TOKEN or TOOL_TOKEN
    experts: RoutedExperts | None = None  # [L, blocks, experts per token], zeros for the last sampled token

    def __len__(self) -> int:
        return len(self.token_ids)

    @property
    def nbytes(self) -> int:
        """Bytes of all columns."""
        experts = 0 if self.experts is None else self.experts.nbytes
        return self.token_ids.nbytes + self.logprobs.nbytes + self.versions.nbytes + experts

    def slice(self, start: int, stop: int) -> TokenColumns:
        """Return views of the tokens ``[start, stop)``."""
        experts = None if self.experts is None else self.experts[start:stop]
        return TokenColumns(self.token_ids[start:stop], self.logprobs[start:stop], self.versions[start:stop], experts)

    def runs(self) -> list[tuple[int, int, int]]:
        """Return (start, stop, version) of each run of tokens with the same entry in ``versions``."""
        if not len(self.versions):
            return []
        edges = [0, *(np.flatnonzero(np.diff(self.versions)) + 1).tolist(), len(self.versions)]
        values = self.versions[edges[:-1]].tolist()
        return list(zip(edges[:-1], edges[1:], values, strict=True))

    def spans(self) -> tuple[Span, ...]:
        """Return the spans of a sample with these columns."""
        return tuple(_span(start, stop, version) for start, stop, version in self.runs())

    def begins_with(self, prefix: TokenColumns) -> bool:
        """Return whether token ids, log-probabilities and versions begin with the entries of ``prefix``, bit for bit."""
        n = len(prefix)
        return (
            len(self) >= n
            and np.array_equal(self.token_ids[:n], prefix.token_ids)
            and np.array_equal(self.versions[:n], prefix.versions)
            and np.array_equal(self.logprobs[:n].view(np.int32), prefix.logprobs.view(np.int32))  # nan equals nan
        )


def context_columns(token_ids: I32, kind: int = PROMPT_TOKEN) -> TokenColumns:
    """Return the columns of tokens that were not sampled; ``kind`` is PROMPT_TOKEN or TOOL_TOKEN."""
    n = len(token_ids)
    ids = np.asarray(token_ids, dtype=np.int32)
    return TokenColumns(ids, np.full(n, np.nan, dtype=np.float32), np.full(n, kind, dtype=np.int32))


def sampled_columns(token_ids: I32, logprobs: F32, versions: Iterable[tuple[int, int, int]]) -> TokenColumns:
    """Return the columns of sampled tokens; ``versions`` contains (start, stop, version) for all tokens, in order."""
    column = np.empty(len(token_ids), dtype=np.int32)
    for start, stop, version in versions:
        column[start:stop] = version
    return TokenColumns(token_ids, logprobs, column)


def span_versions(spans: Iterable[Span]) -> I32:
    """Return the column ``versions`` of a sample with these spans."""
    entries, lengths = [], []
    for span in spans:
        entries.append(span.version if span.source is Source.MODEL else _KINDS[span.source])
        lengths.append(span.stop - span.start)
    return np.repeat(np.array(entries, dtype=np.int32), lengths)


def join(parts: Iterable[TokenColumns]) -> TokenColumns:
    """Concatenate the columns of sequences, without their experts. A single sequence is returned unchanged, with its experts."""
    items = list(parts)
    if len(items) == 1:
        return items[0]
    return TokenColumns(
        np.concatenate([item.token_ids for item in items]),
        np.concatenate([item.logprobs for item in items]),
        np.concatenate([item.versions for item in items]),
    )


_KINDS = {Source.PROMPT: PROMPT_TOKEN, Source.TOOL: TOOL_TOKEN}
_SOURCES = {kind: source for source, kind in _KINDS.items()}


def _span(start: int, stop: int, version: int) -> Span:
    if version in _SOURCES:
        return Span(start, stop, _SOURCES[version])
    return Span(start, stop, Source.MODEL, version)


FIRST_SIZE = 16

Bools = npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class ExpertEntry:
    """Shape and dtype of one token's entry in the column of experts."""

    shape: tuple[int, ...]  # [blocks, experts per token]
    dtype: np.dtype[Any]


@dataclass(slots=True, eq=False)
class Slab:
    """Columns allocated at once, in which one or more extents (``ExtentTable``) lie."""

    columns: TokenColumns  # [size], writable
    num_extents: int  # number of extents of this slab that rows still use

    @staticmethod
    def allocate(size: int, experts: ExpertEntry | None, num_extents: int) -> Slab:
        """Return a slab for ``size`` tokens, divided into ``num_extents`` extents. Experts are 0, all else uninitialised.

        Raises ``MemoryError`` if there is not enough memory.
        """
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
    """Table of extents: ranges of entries in slabs. The rows of an extent are prefixes of it and share its entries.

    The first ``used`` entries of an extent never change; tokens are appended after them.
    """

    size: int = 0
    slab: I64 = field(default_factory=_integers)  # key of the slab
    start: I64 = field(default_factory=_integers)  # position of the first entry in the slab
    used: I64 = field(default_factory=_integers)  # number of entries that a row has written
    capacity: I64 = field(default_factory=_integers)
    num_rows: I64 = field(default_factory=_integers)  # reference count

    def add(self, slab: int, starts: I64, capacities: I64) -> I64:
        """Add extents in one slab, each for a single row, and return their ids."""
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
    """Return a copy, padded with zeros to ``size`` entries or to twice the length of ``array``, whichever is larger."""
    larger = np.zeros(max(size, 2 * len(array)), dtype=array.dtype)
    larger[: len(array)] = array
    return larger  # pyright: ignore[reportReturnType]
