"""Groups a stream of named tensors by bytes, so that the peak of a push is one bucket."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

from slime_like.interfaces import Bucket

if TYPE_CHECKING:
    from torch import Tensor


def buckets(stream: Iterable[tuple[str, Tensor]], max_bytes: int) -> Iterator[Bucket]:
    """Buckets in the stream's order; a tensor larger than ``max_bytes`` travels alone.

    Example: tensors of 6, 6 and 20 bytes with ``max_bytes=12`` give buckets of 12 and 20 bytes.
    """
    held: list[tuple[str, Tensor]] = []
    held_bytes = 0
    for name, tensor in stream:
        size = tensor.numel() * tensor.element_size()
        if held and held_bytes + size > max_bytes:
            yield Bucket(tuple(held))
            held, held_bytes = [], 0
        held.append((name, tensor))
        held_bytes += size
    if held:
        yield Bucket(tuple(held))
