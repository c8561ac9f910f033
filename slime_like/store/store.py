"""Store of a group's samples while they are sampled, as rows of tokens. Tokens are appended to many rows in one batch.

A row is a sequence of tokens that is always contiguous in memory, so that a sample is a view of its row. A fork of a row
shares the row's tokens. Among rows that share tokens, the first to append writes directly after the shared tokens if there
is free space; the others copy them first (copy on write). So k sharing rows make k - 1 copies, or k if there is no free
space. Memory that a row uses is never overwritten (new experts are set in a copy of the row), so views stay valid.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from slime_like.errors import StoreFull
from slime_like.store.columns import Bools, ExpertEntry, ExtentTable, RowTable, Slab, TokenColumns, copy_tokens
from slime_like.types import I64, RoutedExperts

GROUP_CAPACITY = 2**30  # tokens, 12 GiB without experts
MIN_SPARE = 16  # minimum number of free entries after an unfinished row that was moved; long rows get half their length


@dataclass(frozen=True, slots=True)
class Batch:
    """Tokens to append: ``columns`` contains ``counts[i]`` tokens for each ``rows[i]``, in order."""

    rows: I64  # [N], without repetitions
    columns: TokenColumns  # [sum(counts)], without experts
    counts: I64 | None = None  # [N]; None: one token per row
    experts: Sequence[
        RoutedExperts | None
    ] = ()  # [N] or empty: for each row, the experts of its tokens from the first one on, or None to keep them
    is_finished: Bools | None = None  # [N], True if the row accepts no further tokens; None: False for all


class SampleStore:
    """Rows of tokens with their log-probabilities, versions and experts."""

    def __init__(self, capacity: int = GROUP_CAPACITY) -> None:
        """``capacity`` is the maximum number of tokens for which memory is allocated (see ``nbytes``)."""
        self._capacity = capacity
        self._rows, self._extents = RowTable(), ExtentTable()
        self._slabs: dict[int, Slab] = {}
        self._next_slab = 0
        self._num_entries = 0
        self._entry: ExpertEntry | None = None  # shape and dtype of the experts of a token
        self.num_clones = 0  # copies of rows whose tokens another row shared
        self.num_moves = 0  # copies of other rows: there was no space after them, or experts were set

    # ---- rows --------------------------------------------------------------------------------------------------------
    def add(self, columns: TokenColumns) -> int:
        """Add a row with these tokens and return its index.

        Raises ``StoreFull`` if the store or the memory is full, or ``ValueError`` if the experts differ in shape or dtype
        from earlier ones.
        """
        num_tokens = len(columns)
        slab = self._allocate(num_tokens, self._expert_entry([columns.experts]), num_extents=1)
        (extent,) = self._extents.add(slab, np.zeros(1, np.int64), np.array([num_tokens])).tolist()
        copy_tokens(columns, 0, self._slabs[slab].columns, 0, num_tokens)
        self._extents.used[extent] = num_tokens
        return self._rows.add(extent, num_tokens, self._extents, has_experts=columns.experts is not None)[0]

    def fork(self, row: int, length: int | None = None, num_rows: int = 1) -> range:
        """Add ``num_rows`` rows that share the memory of the first ``length`` tokens of ``row``; return their indices.

        By default, they share all tokens of ``row``. Raises ``ValueError`` if ``row`` does not exist, was released or
        has fewer than ``length`` tokens.
        """
        extent, end = self._location(row)
        length = end if length is None else length
        if not 0 <= length <= end:
            raise ValueError(f"row {row} has {end} tokens, a fork of {length} is impossible")
        self._extents.num_rows[extent] += num_rows
        self._rows.limit[row] = 0
        return self._rows.add(
            extent, length, self._extents, has_experts=bool(self._rows.has_experts[row]), num_rows=num_rows
        )

    def release(self, rows: Sequence[int]) -> None:
        """Remove rows. Views of their tokens stay valid.

        Raises ``ValueError`` at a row that does not exist or was released; the rows before it are removed nevertheless.
        """
        for row in rows:
            extent, _ = self._location(row)
            self._rows.extent[row], self._rows.limit[row] = -1, 0
            self._drop_references([extent])

    def length(self, row: int) -> int:
        """Return the number of tokens of a row."""
        return self._location(row)[1]

    def is_finished(self, row: int) -> bool:
        """Return whether a row is finished, that is, accepts no further tokens."""
        return bool(self._rows.is_finished[row])

    def columns(self, row: int, start: int = 0, stop: int | None = None) -> TokenColumns:
        """Return read-only views of the tokens ``[start, stop)`` of a row, all by default."""
        extent, end = self._location(row)
        first = int(self._extents.start[extent])
        last = first + (end if stop is None else min(stop, end))
        views = self._slabs[int(self._extents.slab[extent])].columns.slice(first + start, last)
        experts = views.experts if self._rows.has_experts[row] else None
        for view in (views.token_ids, views.logprobs, views.versions, views.experts):
            if view is not None:
                view.flags.writeable = False
        return TokenColumns(views.token_ids, views.logprobs, views.versions, experts)

    def longest_prefix(self, columns: TokenColumns) -> int | None:
        """Return the index of the longest non-empty row that is a prefix of ``columns``; None if no row is.

        Only token ids are compared.
        """
        size, ids = self._rows.size, columns.token_ids
        length = self._rows.length[:size]
        candidates = np.flatnonzero((self._rows.extent[:size] >= 0) & (length <= len(ids)) & (length > 0))
        for row in candidates[np.argsort(-length[candidates], kind="stable")].tolist():
            if np.array_equal(self.columns(row).token_ids, ids[: length[row]]):
                return row
        return None

    @property
    def nbytes(self) -> int:
        """Bytes of all slabs, including free space after rows. A released row counts until its slab has no other rows."""
        return sum(slab.columns.nbytes for slab in self._slabs.values())

    # ---- append ------------------------------------------------------------------------------------------------------
    def append_batch(self, batch: Batch) -> None:
        """Append tokens to rows.

        Raises ``StoreFull`` if the store or the memory is full, or ``ValueError`` if a row does not exist or is released,
        finished or repeated, if the batch is inconsistent, or if its experts differ in shape or dtype from earlier ones. No
        row is changed in these cases.
        """
        if not self._append_token_per_row(batch):
            self._append_any(batch)

    def _append_token_per_row(self, batch: Batch) -> bool:
        """Append one token to each row with one indexed write per column. If that is not possible, return False.

        It is not possible if the batch is empty or inconsistent or has fields other than rows and columns, or if a row is
        invalid, may have to be moved or is not in the slab of the first row. Nothing is changed in these cases.
        """
        table, rows, columns = self._rows, batch.rows, batch.columns
        n = len(rows)
        if batch.counts is not None or batch.is_finished is not None or not n == len(columns) > 0:
            return False
        if batch.experts or columns.experts is not None:
            return False
        if len(set(ids := rows.tolist())) < n or min(ids) < 0 or max(ids) >= table.size:
            return False
        lengths, slabs = table.length[rows], table.slab[rows]
        ends = lengths + 1
        if np.count_nonzero(ends <= table.limit[rows]) < n or np.count_nonzero(slabs == slabs[0]) < n:
            return False
        index, target = table.start[rows] + lengths, self._slabs[int(slabs[0])].columns
        target.token_ids[index], target.logprobs[index] = columns.token_ids, columns.logprobs
        target.versions[index] = columns.versions
        table.length[rows] = self._extents.used[table.extent[rows]] = ends
        return True

    def _append_any(self, batch: Batch) -> None:
        table, rows, extents = self._rows, batch.rows, self._extents
        counts = np.ones(len(rows), dtype=np.int64) if batch.counts is None else batch.counts
        self._check(batch, counts)
        entry = self._expert_entry(batch.experts)
        lengths = table.length[rows]
        ends = lengths + counts
        positions = self._positions_to_move(batch, counts, ends)
        if len(positions):
            self._move(batch, positions, ends, entry)
        starts = (table.start[rows] + lengths).tolist()
        position = 0
        for key, start, num_tokens in zip(table.slab[rows].tolist(), starts, counts.tolist(), strict=True):
            if num_tokens:
                copy_tokens(batch.columns, position, self._slabs[key].columns, start, num_tokens)
            position += num_tokens
        table.length[rows] = ends
        target_extents = table.extent[rows[counts > 0]]
        extents.used[target_extents] = ends[counts > 0]
        if batch.is_finished is not None:
            table.is_finished[rows] = batch.is_finished
        row_extents = table.extent[rows]
        is_exclusive = (
            (extents.num_rows[row_extents] == 1) & (extents.used[row_extents] == ends) & ~table.is_finished[rows]
        )
        table.limit[rows] = np.where(is_exclusive, extents.capacity[row_extents], 0)

    def _check(self, batch: Batch, counts: I64) -> None:
        rows = batch.rows
        if len(counts) != len(rows) or int(counts.sum()) != len(batch.columns):
            raise ValueError(f"{len(batch.columns)} tokens and {len(counts)} counts for {len(rows)} rows")
        if len(batch.experts) not in (0, len(rows)):
            raise ValueError(f"experts of {len(batch.experts)} rows for {len(rows)} rows")
        if batch.columns.experts is not None:
            raise ValueError("the columns of a batch contain experts: pass experts as Batch.experts")
        if len(set(rows.tolist())) != len(rows):
            raise ValueError(f"a row occurs twice in a batch: {rows.tolist()}")
        if len(rows) and (rows.min() < 0 or rows.max() >= self._rows.size or self._rows.extent[rows].min() < 0):
            raise ValueError(f"a row of {rows.tolist()} does not exist or was released")
        if self._rows.is_finished[rows].any():
            raise ValueError(f"rows {rows[self._rows.is_finished[rows]].tolist()} are finished: no tokens may follow")

    def _positions_to_move(self, batch: Batch, counts: I64, ends: I64) -> I64:
        """Return the positions in the batch of the rows that must be copied to new memory before tokens are appended."""
        table, row_extents = self._extents, self._rows.extent[batch.rows]
        fits = (table.used[row_extents] == ends - counts) & (ends <= table.capacity[row_extents])
        if len(row_extents) and table.num_rows[row_extents].max() > 1:
            writable = np.flatnonzero(fits & (counts > 0))
            first = writable[np.unique(row_extents[writable], return_index=True)[1]]
            fits[writable] = False
            fits[first] = True
        fits |= counts == 0
        for position, experts in enumerate(batch.experts):
            if experts is not None:  # experts are set for all tokens, including tokens that other rows or views share
                fits[position] = False
        return np.flatnonzero(~fits)

    def _move(self, batch: Batch, positions: I64, ends: I64, entry: ExpertEntry | None) -> None:
        """Copy the rows at ``positions`` of the batch to new memory, and set their experts if the batch has any for them.

        The new memory has space for the batch's tokens and, unless the batch finishes the row, spare space.
        """
        required_sizes = ends[positions]
        spare = np.maximum(required_sizes // 2, MIN_SPARE)
        if batch.is_finished is not None:
            spare[batch.is_finished[positions]] = 0
        stops = np.cumsum(required_sizes + spare)
        key = self._allocate(int(stops[-1]), entry, num_extents=len(positions))
        rows, starts = batch.rows[positions], stops - required_sizes - spare
        self._copy_rows(rows, key, starts)
        for position, row, start in zip(positions.tolist(), rows.tolist(), starts.tolist(), strict=True):
            if batch.experts and batch.experts[position] is not None:
                self._set_experts(row, key, start, batch.experts[position], int(ends[position]))
        old_extents = self._rows.extent[rows].tolist()
        extents = self._extents.add(key, starts, required_sizes + spare)
        self._extents.used[extents] = self._rows.length[rows]
        self._rows.extent[rows], self._rows.slab[rows], self._rows.start[rows] = extents, key, starts
        num_shared = self._drop_references(old_extents)
        self.num_clones, self.num_moves = self.num_clones + num_shared, self.num_moves + len(old_extents) - num_shared

    def _copy_rows(self, rows: I64, key: int, starts: I64) -> None:
        table, target = self._rows, self._slabs[key].columns
        columns = (table.slab, table.start, table.length)
        sources, firsts, lengths = (column[rows].tolist() for column in columns)
        for source, first, start, length in zip(sources, firsts, starts.tolist(), lengths, strict=True):
            if length:
                copy_tokens(self._slabs[source].columns, first, target, start, length)

    def _set_experts(self, row: int, key: int, start: int, experts: RoutedExperts | None, num_tokens: int) -> None:
        """Set the experts of a row's ``num_tokens`` tokens, whose memory begins at ``start`` of the slab with key ``key``.

        Tokens after the last entry of ``experts`` get zeros; entries beyond ``num_tokens`` are ignored.
        """
        target = self._slabs[key].columns.experts
        assert experts is not None and target is not None
        self._rows.has_experts[row] = True
        num_rows = min(len(experts), num_tokens)
        target[start : start + num_rows] = experts[:num_rows]
        target[start + num_rows : start + num_tokens] = 0

    # ---- memory ------------------------------------------------------------------------------------------------------
    def _expert_entry(self, experts: Iterable[RoutedExperts | None]) -> ExpertEntry | None:
        """Return the shape and dtype common to ``experts`` and all earlier experts; None if there are no experts at all.

        Raises ``ValueError`` if they differ.
        """
        entries = {ExpertEntry(rows.shape[1:], rows.dtype) for rows in experts if rows is not None}
        if self._entry is not None:
            entries.add(self._entry)
        if len(entries) > 1:
            raise ValueError(f"experts of different shapes or dtypes: {entries}")
        return next(iter(entries), None)

    def _allocate(self, size: int, entry: ExpertEntry | None, num_extents: int) -> int:
        """Add a slab for ``size`` tokens, with experts as ``entry`` describes, and return its key.

        Raises ``StoreFull`` if the store or the memory is full.
        """
        if self._num_entries + size > self._capacity:
            raise StoreFull(
                f"the samples of a group need memory for {self._num_entries + size} tokens, but the limit is {self._capacity}: lower "
                "rollout.n_samples_per_prompt or rollout.max_context_len"
            )
        try:
            slab = Slab.allocate(size, entry, num_extents)
        except MemoryError as error:
            raise StoreFull(f"no memory for {size} more tokens in flight: lower rollout.batch_size") from error
        key, self._next_slab = self._next_slab, self._next_slab + 1
        self._slabs[key] = slab
        self._num_entries += size
        self._entry = entry
        return key

    def _drop_references(self, extents: Sequence[int]) -> int:
        """Remove one reference per entry of ``extents``, and free each extent whose last reference is removed.

        Return the number of removed references that were not the last one of their extent.
        """
        num_shared = 0
        for extent, num_removed in Counter(extents).items():
            num_references = int(self._extents.num_rows[extent]) - num_removed
            self._extents.num_rows[extent] = num_references
            num_shared += num_removed if num_references else num_removed - 1
            if not num_references:
                self._drop_extent(int(self._extents.slab[extent]))
        return num_shared

    def _drop_extent(self, key: int) -> None:
        slab = self._slabs[key]
        slab.num_extents -= 1
        if not slab.num_extents:
            del self._slabs[key]
            self._num_entries -= len(slab.columns)

    def _location(self, row: int) -> tuple[int, int]:
        """Return a row's extent and length. Raises ``ValueError`` if the row does not exist or was released."""
        extent = int(self._rows.extent[row]) if 0 <= row < self._rows.size else -1
        if extent < 0:
            raise ValueError(f"row {row} does not exist or was released")
        return extent, int(self._rows.length[row])


@dataclass(frozen=True, slots=True, eq=False)
class StoreRow:
    """One row of a ``SampleStore``."""

    store: SampleStore
    index: int

    def __len__(self) -> int:
        return self.store.length(self.index)

    @property
    def columns(self) -> TokenColumns:
        """Read-only views of the columns of all tokens."""
        return self.store.columns(self.index)

    def fork(self, length: int | None = None) -> StoreRow:
        """Return a new row that shares the memory of the first ``length`` tokens, all by default."""
        return StoreRow(self.store, self.store.fork(self.index, length)[0])

    def append(self, columns: TokenColumns, experts: RoutedExperts | None = None) -> None:
        """Append tokens. ``experts`` replaces the experts of the row, from its first token on; None keeps them.

        Tokens after the last entry of ``experts`` get zeros.
        """
        counts = np.array([len(columns)])
        self.store.append_batch(Batch(np.array([self.index]), columns, counts, (experts,)))

    def release(self) -> None:
        """Remove the row from its store. Raises ``ValueError`` if it was already removed."""
        self.store.release([self.index])
