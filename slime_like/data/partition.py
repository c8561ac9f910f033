"""Partition of sequences over data-parallel ranks into nearly equal numbers of tokens."""

from __future__ import annotations

import heapq
from collections.abc import Sequence


def balance(lengths: Sequence[int], parts: int) -> list[list[int]]:
    """Return indices of ``lengths`` in ``parts`` ascending lists of nearly equal sum.

    Longest first to the least loaded part (Graham 1969, LPT: at most 4/3 of the best possible largest sum).
    Deterministic: ties go to the lower index. No list is empty when there are at least ``parts`` lengths.

    Example: ``balance([5, 4, 3, 2], 2) == [[0, 3], [1, 2]]``.
    """
    assigned: list[list[int]] = [[] for _ in range(parts)]
    # The count breaks ties before the index, so that zero lengths are spread too.
    heap = [(0, 0, part) for part in range(parts)]
    for index in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        load, count, part = heapq.heappop(heap)
        assigned[part].append(index)
        heapq.heappush(heap, (load + lengths[index], count + 1, part))
    return [sorted(part) for part in assigned]
