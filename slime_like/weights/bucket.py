"""Grouping of a stream of named tensors by bytes, so that the peak memory of a push is one bucket."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

from slime_like.interfaces import Bucket

if TYPE_CHECKING:
    from torch import Tensor


def buckets(stream: Iterable[tuple[str, Tensor]], max_bytes: int) -> Iterator[Bucket]:
    """Yield buckets in the stream's order; a tensor larger than ``max_bytes`` gets its own bucket.

    Example: tensors of 6, 6 and 20 bytes with ``max_bytes=12`` give buckets of 12 and 20 bytes.
    """
    tensors: list[tuple[str, Tensor]] = []
    num_bytes = 0
    for name, tensor in stream:
        size = tensor.numel() * tensor.element_size()
        if tensors and num_bytes + size > max_bytes:
            yield Bucket(tuple(tensors))
            tensors, num_bytes = [], 0
        tensors.append((name, tensor))
        num_bytes += size
    if tensors:
        yield Bucket(tuple(tensors))
