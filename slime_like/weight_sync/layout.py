"""Layout of a bucket's tensors in one block of memory: aligned, in the bucket's order."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from slime_like.errors import WeightSyncError
from slime_like.interfaces import Bucket
from slime_like.weight_sync.manifest import meta_of

ALIGNMENT = 64  # bytes
DTYPES = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (
        torch.float32,
        torch.bfloat16,
        torch.float16,
        torch.float8_e4m3fn,
        torch.uint8,
        torch.int8,
        torch.int32,
    )
}

type TensorEntry = tuple[str, str, tuple[int, ...], int]
"""Name, dtype, shape, and offset in bytes."""


def lay_out(bucket: Bucket) -> tuple[list[TensorEntry], int]:
    """Return the entry of each tensor and the total number of bytes. Raises ``WeightSyncError`` on an unsupported dtype."""
    entries: list[TensorEntry] = []
    end = 0
    for name, tensor in bucket.tensors:
        meta = meta_of(name, tensor)
        if meta.dtype not in DTYPES:
            raise WeightSyncError(f"{name} is {meta.dtype}; weights are sent as one of {', '.join(DTYPES)}")
        offset = -(-end // ALIGNMENT) * ALIGNMENT
        entries.append((name, meta.dtype, meta.shape, offset))
        end = offset + tensor.numel() * tensor.element_size()
    return entries, end


def view(memory: Tensor, dtype: str, shape: Sequence[int], offset: int) -> Tensor:
    """Return a view of ``memory`` (uint8) from byte ``offset`` as a tensor. Raises ``ValueError`` if it exceeds the memory."""
    size = math.prod(shape) * DTYPES[dtype].itemsize
    if min(shape, default=0) < 0 or offset < 0 or offset + size > len(memory):
        raise ValueError(f"{dtype} {list(shape)} at {offset} of {len(memory)} bytes")
    return memory[offset : offset + size].view(DTYPES[dtype]).view(tuple(shape))
