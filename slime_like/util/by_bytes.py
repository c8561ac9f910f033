"""Grouping of a stream by bytes, so that the peak memory of a transfer is one group."""

from __future__ import annotations

from collections.abc import Iterable, Iterator


def by_bytes[Item](stream: Iterable[tuple[Item, int]], max_bytes: int) -> Iterator[list[Item]]:
    """Yield the items of (item, bytes) pairs in groups of at most ``max_bytes``; a larger item gets its own group.

    Example: items of 6, 6 and 20 bytes with ``max_bytes=12`` give groups of 12 and 20 bytes.
    """
    group: list[Item] = []
    size = 0
    for item, num_bytes in stream:
        if group and size + num_bytes > max_bytes:
            yield group
            group, size = [], 0
        group.append(item)
        size += num_bytes
    if group:
        yield group
