"""Store of the samples of a group while they are sampled: one set of columns for all of them, appended to in batches.

A row is a sequence of tokens, and always contiguous in memory, so that a sample is a view of its row. A fork shares the tokens
of its row. The first sharer that appends writes after the shared tokens if there is room; each other sharer first copies them
(copy on write), so k sharers make k - 1 copies. Entries that a row contains never change, so views stay valid.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from slime_like.errors import StoreFull
from slime_like.store.columns import TokenColumns
from slime_like.store.tables import Bools, ExpertShape, ExtentTable, RowTable, Slab, copy_tokens
from slime_like.types import I64, RoutedExperts

GROUP_CAPACITY = 2**30  # tokens, 12 GiB without experts
MIN_SPARE = 16  # entries behind a row that has moved and is not finished; at least half of its length
MIN_COPY = 32  # tokens per row from which a copy per row is faster than one indexed write


@dataclass(frozen=True, slots=True)
class Batch:
    """Tokens to append: ``counts[i]`` of them to ``rows[i]``, in the order of ``columns``."""

    rows: I64  # [N], different
    counts: I64  # [N]
    columns: TokenColumns  # [sum(counts)], its experts are not used
    experts: Sequence[
        RoutedExperts | None
    ] = ()  # [N] or empty: of the row's first tokens, old and new; None keeps them
    is_finished: Bools | None = None  # [N], rows that refuse later tokens; None: none of them


class SampleStore:
    """Rows of tokens with their log-probabilities, versions and experts."""

    def __init__(self, capacity: int = GROUP_CAPACITY) -> None:
        """``capacity`` is the maximum number of tokens, including room behind rows."""
        self._capacity = capacity
        self._rows, self._extents = RowTable(), ExtentTable()
        self._slabs: dict[int, Slab] = {}
        self._next_slab = 0
        self._num_entries = 0
        self._expert_shape: ExpertShape | None = None
        self.num_clones = 0  # rows copied because another row shares their tokens
        self.num_moves = 0  # rows copied because there was no room behind them

    # ---- rows --------------------------------------------------------------------------------------------------------
    def add(self, columns: TokenColumns) -> int:
        """Add a row with these tokens and return it. Raises ``StoreFull``."""
        count = len(columns)
        if columns.experts is not None:
            self._expert_shape = ExpertShape(columns.experts.shape[1:], columns.experts.dtype)
        slab = self._allocate(count, num_extents=1)
        (extent,) = self._extents.add(slab, np.zeros(1, np.int64), np.array([count])).tolist()
        copy_tokens(columns, 0, self._slabs[slab].columns, 0, count)
        self._extents.used[extent] = count
        return self._rows.add(extent, count, has_experts=columns.experts is not None)[0]

    def fork(self, row: int, length: int | None = None, count: int = 1) -> range:
        """Return ``count`` new rows with the first ``length`` tokens of ``row``, all by default. They share its memory."""
        extent, end = self._location(row)
        length = end if length is None else length
        if not 0 <= length <= end:
            raise ValueError(f"row {row} has {end} tokens, a fork of {length} is impossible")
        self._extents.num_rows[extent] += count
        return self._rows.add(extent, length, has_experts=bool(self._rows.has_experts[row]), count=count)

    def release(self, rows: Sequence[int]) -> None:
        """Remove rows. Views of their tokens stay valid."""
        for row in rows:
            extent, _ = self._location(row)
            self._rows.extent[row] = -1
            self._drop_reference(extent)

    def length(self, row: int) -> int:
        """Return the number of tokens of a row."""
        return self._location(row)[1]

    def is_finished(self, row: int) -> bool:
        """Return whether a row refuses further tokens."""
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
        """Return the longest row whose tokens begin ``columns``, None if there is none."""
        size, ids = self._rows.size, columns.token_ids
        length = self._rows.length[:size]
        candidates = np.flatnonzero((self._rows.extent[:size] >= 0) & (length <= len(ids)) & (length > 0))
        for row in candidates[np.argsort(-length[candidates], kind="stable")].tolist():
            if np.array_equal(self.columns(row).token_ids, ids[: length[row]]):
                return row
        return None

    @property
    def nbytes(self) -> int:
        """Bytes of the columns of all rows, including room behind them."""
        return sum(slab.columns.nbytes for slab in self._slabs.values())

    # ---- append ------------------------------------------------------------------------------------------------------
    def append_batch(self, batch: Batch) -> None:
        """Append tokens to rows.

        Raises ``StoreFull`` or, for finished, released or repeated rows, ``ValueError``, before any row is changed.
        """
        rows, counts = batch.rows, batch.counts
        self._check(batch)
        extents, lengths = self._rows.extent[rows], self._rows.length[rows]
        ends = lengths + counts
        moved = self._without_room(batch, extents, lengths, ends)
        if len(moved):
            self._move(batch, moved, ends)
            extents = self._rows.extent[rows]
        self._write(batch, extents, lengths)
        self._rows.length[rows] = ends
        grows = counts > 0
        self._extents.used[extents[grows]] = ends[grows]
        if batch.is_finished is not None:
            self._rows.is_finished[rows] = batch.is_finished

    def _check(self, batch: Batch) -> None:
        rows = batch.rows
        if len(batch.counts) != len(rows) or int(batch.counts.sum()) != len(batch.columns):
            raise ValueError(f"{len(batch.columns)} tokens and {len(batch.counts)} counts for {len(rows)} rows")
        if len(set(rows.tolist())) != len(rows):
            raise ValueError(f"a row occurs twice in a batch: {rows.tolist()}")
        if len(rows) and (rows.min() < 0 or rows.max() >= self._rows.size or self._rows.extent[rows].min() < 0):
            raise ValueError(f"a row of {rows.tolist()} does not exist or was released")
        if self._rows.is_finished[rows].any():
            raise ValueError(f"rows {rows[self._rows.is_finished[rows]].tolist()} are finished: no tokens may follow")

    def _without_room(self, batch: Batch, extents: I64, lengths: I64, ends: I64) -> I64:
        """Return the positions in the batch of rows that must be copied before they can be written."""
        table = self._extents
        fits = (table.used[extents] == lengths) & (ends <= table.capacity[extents])
        if len(extents) and table.num_rows[extents].max() > 1:
            wanted = np.flatnonzero(fits & (batch.counts > 0))
            first = wanted[np.unique(extents[wanted], return_index=True)[1]]
            fits[wanted] = False
            fits[first] = True
        fits |= batch.counts == 0
        for position, experts in enumerate(batch.experts):
            if experts is not None:  # of all tokens, also of those that other rows or views share
                fits[position] = False
        return np.flatnonzero(~fits)

    def _move(self, batch: Batch, moved: I64, ends: I64) -> None:
        """Copy rows to new memory with room for the batch. Finished rows get no more than that."""
        for experts in batch.experts:
            if experts is not None:
                self._expert_shape = ExpertShape(experts.shape[1:], experts.dtype)
        needed = ends[moved]
        spare = np.maximum(needed // 2, MIN_SPARE)
        if batch.is_finished is not None:
            spare[batch.is_finished[moved]] = 0
        stops = np.cumsum(needed + spare)
        key = self._allocate(int(stops[-1]), num_extents=len(moved))
        target, starts = self._slabs[key].columns, stops - needed - spare
        extents = self._extents.add(key, starts, needed + spare)
        for position, start, extent in zip(moved.tolist(), starts.tolist(), extents.tolist(), strict=True):
            row = int(batch.rows[position])
            old, length = self._location(row)
            source = self._slabs[int(self._extents.slab[old])].columns
            copy_tokens(source, int(self._extents.start[old]), target, start, length)
            experts = batch.experts[position] if batch.experts else None
            if experts is not None and target.experts is not None:
                self._rows.has_experts[row] = True
                num_tokens = min(len(experts), int(ends[position]))
                target.experts[start : start + num_tokens] = experts[:num_tokens]
                target.experts[start + num_tokens : start + length] = 0
            self._extents.used[extent] = length
            self._rows.extent[row] = extent
            is_shared = self._extents.num_rows[old] > 1
            self.num_clones, self.num_moves = self.num_clones + is_shared, self.num_moves + (not is_shared)
            self._drop_reference(old)

    def _write(self, batch: Batch, extents: I64, lengths: I64) -> None:
        columns, counts = batch.columns, batch.counts
        starts = self._extents.start[extents] + lengths
        slabs = self._extents.slab[extents]
        if len(slabs) and len(columns) < MIN_COPY * len(slabs) and (slabs == slabs[0]).all():
            first = np.cumsum(counts) - counts
            index = starts if len(columns) == len(first) and counts.all() else _ranges(starts - first, counts)
            target = self._slabs[int(slabs[0])].columns
            target.token_ids[index], target.logprobs[index] = columns.token_ids, columns.logprobs
            target.versions[index] = columns.versions
            return
        position = 0
        for key, start, count in zip(slabs.tolist(), starts.tolist(), counts.tolist(), strict=True):
            if count:
                copy_tokens(columns, position, self._slabs[key].columns, start, count)
            position += count

    # ---- memory ------------------------------------------------------------------------------------------------------
    def _allocate(self, size: int, num_extents: int) -> int:
        """Return the key of a new slab. Raises ``StoreFull``."""
        if self._num_entries + size > self._capacity:
            raise StoreFull(
                f"the samples of a group need memory for {self._num_entries + size} tokens, and may have {self._capacity}: lower "
                "rollout.n_samples_per_prompt or rollout.max_context_len"
            )
        try:
            slab = Slab.allocate(size, self._expert_shape, num_extents)
        except MemoryError as error:
            raise StoreFull(f"no memory for {size} more tokens in flight: lower rollout.batch_size") from error
        key, self._next_slab = self._next_slab, self._next_slab + 1
        self._slabs[key] = slab
        self._num_entries += size
        return key

    def _drop_reference(self, extent: int) -> None:
        self._extents.num_rows[extent] -= 1
        if self._extents.num_rows[extent]:
            return
        key = int(self._extents.slab[extent])
        slab = self._slabs[key]
        slab.num_extents -= 1
        if not slab.num_extents:
            del self._slabs[key]
            self._num_entries -= len(slab.columns)

    def _location(self, row: int) -> tuple[int, int]:
        """Return extent and length of a row."""
        extent = int(self._rows.extent[row]) if 0 <= row < self._rows.size else -1
        if extent < 0:
            raise ValueError(f"row {row} does not exist or was released")
        return extent, int(self._rows.length[row])


def _ranges(firsts: I64, counts: I64) -> I64:
    """Return the destination of each token; ``firsts`` is the row's first destination minus the position of its first token."""
    return np.repeat(firsts, counts) + np.arange(int(counts.sum()))
