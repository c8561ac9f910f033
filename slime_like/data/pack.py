"""Distribution of sequences over data-parallel ranks, and packing into micro-batches with a token limit.

A row is the list of the indices of the sequences in one micro-batch.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence

import numpy as np


def balance(lengths: Sequence[int], parts: int) -> list[list[int]]:
    """Return the indices of ``lengths`` in ``parts`` lists, each ascending, with nearly equal sums of lengths.

    Assigns each index, longest first, to the list with the smallest sum (Graham 1969, LPT: the largest sum is at most 4/3 of
    the optimum). Deterministic: ties go to the lower index. No list is empty if there are at least ``parts`` lengths.

    Example: ``balance([5, 4, 3, 2], 2) == [[0, 3], [1, 2]]``.
    """
    assigned: list[list[int]] = [[] for _ in range(parts)]
    # The number of assigned lengths breaks ties before the index, so that zero lengths are distributed too.
    heap = [(0, 0, part) for part in range(parts)]
    for index in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        load, count, part = heapq.heappop(heap)
        assigned[part].append(index)
        heapq.heappush(heap, (load + lengths[index], count + 1, part))
    return [sorted(part) for part in assigned]


def first_fit_decreasing(lengths: Sequence[int], budget: int) -> list[list[int]]:
    """Return indices of ``lengths`` in rows of at most ``budget`` tokens; a longer sequence gets a separate row.

    Puts each index, longest first, into the first row with enough space (Johnson 1973: at most 11/9 of the fewest rows + 1).

    Example: ``first_fit_decreasing([3, 9, 4, 5], 8) == [[1], [0, 3], [2]]``.
    """
    rows: list[list[int]] = []
    free = np.zeros(len(lengths), dtype=np.int64)
    for index in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        fits = np.flatnonzero(free[: len(rows)] >= lengths[index])
        if len(fits):
            row = int(fits[0])
        else:
            row = len(rows)
            rows.append([])
            free[row] = max(budget, lengths[index])
        rows[row].append(index)
        free[row] -= lengths[index]
    return [sorted(row) for row in rows]


def split_to(rows: list[list[int]], lengths: Sequence[int], num_rows: int) -> list[list[int]]:
    """Split ``rows`` into ``num_rows``: repeatedly halve the row with the most tokens of those with several sequences.

    Returns fewer rows if no row with several sequences is left.
    """
    rows = [list(row) for row in rows]
    while len(rows) < num_rows:
        divisible = [i for i, row in enumerate(rows) if len(row) > 1]
        if not divisible:
            break
        largest = max(divisible, key=lambda i: (sum(lengths[j] for j in rows[i]), -i))
        row_to_split = rows.pop(largest)
        halves = balance([lengths[j] for j in row_to_split], 2)
        rows[largest:largest] = [[row_to_split[j] for j in half] for half in halves]
    return rows


def pack_equal(lengths: Sequence[int], dp: int, budget: int) -> list[list[list[int]]]:
    """Return ``[dp][m]`` rows of sequence indices, with the same m for every dp rank.

    A rank with fewer rows splits some of them, which costs less than an idle micro-batch. A rank that has only rows of one
    sequence gets empty rows, which the caller fills: every rank must run the same number of micro-batches.
    """
    ranks: list[list[list[int]]] = []
    for part in balance(lengths, dp):
        local = first_fit_decreasing([lengths[i] for i in part], budget)
        ranks.append([[part[i] for i in row] for row in local])
    m = max(len(rows) for rows in ranks)
    packed = [split_to(rows, lengths, m) for rows in ranks]
    return [rows + [[] for _ in range(m - len(rows))] for rows in packed]
