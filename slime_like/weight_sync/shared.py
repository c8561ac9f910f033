"""Tensors shared by processes on one machine: memory with no path in the file system, and a small message about it.

The sender writes into a memfd. The kernel frees it when no process has it open or mapped. Only processes of the same user,
or of root, can open it (through ``/proc/<pid>/fd``). A receiver accepts only a memfd of its own user that is sealed against
shrinking, and builds tensors from names, dtypes and shapes: it unpickles nothing.
"""

from __future__ import annotations

import contextlib
import json
import math
import mmap
import os
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor

from slime_like.errors import WeightSyncError
from slime_like.interfaces import Bucket
from slime_like.util.sealed_memory import create_sealed, map_sealed
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
    """Return the ``TensorEntry`` of each tensor of ``bucket``, and the number of bytes that they occupy with alignment.

    Raises ``WeightSyncError`` if a dtype is not supported.
    """
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
    """Return a view of ``memory`` (uint8) from byte ``offset`` as a tensor.

    Raises ``KeyError`` on a dtype that is not in ``DTYPES``, ``ValueError`` if the tensor exceeds the memory, if a dimension
    or ``offset`` is negative, or if ``offset`` is not a multiple of the dtype's size.
    """
    itemsize = DTYPES[dtype].itemsize
    size = math.prod(shape) * itemsize
    if min(shape, default=0) < 0 or offset < 0 or offset + size > len(memory):
        raise ValueError(
            f"a tensor of {dtype} {list(shape)} at byte {offset} does not fit into the shared memory of {len(memory)} bytes"
        )
    if offset % itemsize:
        raise ValueError(
            f"a tensor of {dtype} at byte {offset}, which is not a multiple of its {itemsize} bytes per element"
        )
    return memory[offset : offset + size].view(DTYPES[dtype]).view(tuple(shape))


def pin(memory: Tensor) -> None:
    """Page-lock a tensor's host memory, shared memory included. Call ``unpin`` before the memory is unmapped.

    A GPU copies to page-locked memory directly, and the host does not wait for each copy. Raises ``WeightSyncError`` if
    CUDA cannot lock it.
    """
    error = int(_cudart().cudaHostRegister(memory.data_ptr(), memory.numel() * memory.element_size(), 0))
    if error != 0:
        _clear_error()
        raise WeightSyncError(
            f"CUDA cannot page-lock {memory.numel() * memory.element_size() / 2**20:.0f} MiB of host memory for a bucket of weights "
            f"(cudaHostRegister returned {error}): raise the limit of locked memory (ulimit -l, docker run --ulimit memlock=-1), or "
            "lower weights.bucket_mb"
        )


def unpin(memory: Tensor) -> None:
    """Unlock memory that ``pin`` locked. No copy may be using it."""
    _cudart().cudaHostUnregister(memory.data_ptr())


def _clear_error() -> None:
    """Clear the CUDA runtime's last error, which torch would otherwise raise at its next kernel launch.

    A kernel launched here makes torch raise and clear the error. Remove this function once torch has a function for this.
    """
    with contextlib.suppress(RuntimeError):
        torch.ones(1, device="cuda")


def _cudart() -> Any:
    """Return torch's bindings of the CUDA runtime, which have no type annotations."""
    return torch.cuda.cudart()


MAGIC = b"slime_like shared tensors\n"


class SharedBucketMemory:
    """Reusable memory for one bucket at a time. It grows to the largest bucket, and is page-locked for tensors on a GPU."""

    def __init__(self) -> None:
        self._fd = -1
        self._bytes: Tensor | None = None
        self._is_pinned = False
        self._bucket = Bucket(())  # the last bucket, whose tensors are views of this memory

    def write(self, bucket: Bucket) -> bytes:
        """Copy a bucket's tensors into the memory.

        Return the message for ``map_tensors``, which is valid until the next ``write`` or ``close``. Raises
        ``WeightSyncError`` if a dtype is not supported or the memory cannot be page-locked.
        """
        entries, size = lay_out(bucket)
        on_gpu = any(tensor.is_cuda for _, tensor in bucket.tensors)
        memory = self._memory_of(size, pinned=on_gpu)
        self._bucket = Bucket(
            tuple((name, view(memory, dtype, shape, offset)) for name, dtype, shape, offset in entries)
        )
        try:
            for (_, copy), (_, tensor) in zip(self._bucket.tensors, bucket.tensors, strict=True):
                copy.copy_(tensor.detach(), non_blocking=True)
        finally:  # even after an error, since ``close`` unlocks the memory, which no copy may be using then
            if on_gpu:
                torch.cuda.current_stream().synchronize()
        return MAGIC + json.dumps({"pid": os.getpid(), "fd": self._fd, "tensors": entries}).encode()

    @property
    def bucket(self) -> Bucket:
        """The last bucket's tensors in this memory, valid until the next ``write``."""
        return self._bucket

    def close(self) -> None:
        """Release the memory. Receivers that have it open keep it until they close it."""
        self._bucket = Bucket(())
        if self._bytes is not None:
            if self._is_pinned:
                unpin(self._bytes)
            os.close(self._fd)
            self._bytes, self._fd, self._is_pinned = None, -1, False

    def _memory_of(self, size: int, *, pinned: bool) -> Tensor:
        """Return memory of at least ``size`` bytes; allocate new memory if the current memory is too small.

        Raises ``WeightSyncError`` if ``pinned`` and the memory cannot be page-locked.
        """
        if self._bytes is None or len(self._bytes) < size:
            self.close()
            self._fd, memory = create_sealed("slime_like-weights", size)
            self._bytes = _as_tensor(memory)
        if pinned and not self._is_pinned:
            pin(self._bytes)
            self._is_pinned = True
        return self._bytes


def is_message(payload: bytes) -> bool:
    """Return whether ``payload`` begins like a message of ``SharedBucketMemory.write``."""
    return payload.startswith(MAGIC)


@contextmanager
def map_tensors(payload: bytes) -> Generator[list[tuple[str, Tensor]]]:
    """Yield the tensors that ``payload`` describes. They are in the sender's memory: copy them before the block ends.

    Raises ``WeightSyncError`` if the message is malformed, if the memory cannot be opened or is too small for a tensor, or if
    a tensor is still in use at the end.
    """
    memory = None
    try:
        message: Any = json.loads(payload[len(MAGIC) :])
        memory = _open(int(message["pid"]), int(message["fd"]))
        data = _as_tensor(memory)
        tensors = [(str(name), view(data, *place)) for name, *place in message["tensors"]]
    except (KeyError, TypeError, ValueError) as error:
        raise WeightSyncError(f"a message about shared tensors is malformed: {error}") from error
    yield tensors
    tensors.clear()
    del data
    try:
        memory.close()  # fails while a tensor refers to it
    except BufferError as error:
        raise WeightSyncError("the engine kept a tensor in the sender's memory instead of copying it") from error


def _open(pid: int, fd: int) -> mmap.mmap:
    """Map the sender's memory. Raises ``WeightSyncError`` if it cannot be mapped or is not sealed memory of this user."""
    try:
        return map_sealed(pid, fd, mmap.ACCESS_COPY)  # writes are private to this process
    except OSError as error:
        raise WeightSyncError(
            f"/proc/{pid}/fd/{fd}: the engine cannot open the sender's memory ({error.strerror}): run engine and trainer as one user "
            "in one container, or set placement.mode=split, which broadcasts weights"
        ) from error
    except ValueError as error:
        raise WeightSyncError(str(error)) from error


def _as_tensor(memory: mmap.mmap) -> Tensor:
    """Return a uint8 tensor over the mapping. The mapping cannot be closed while the tensor or a view of it exists."""
    return torch.from_numpy(np.frombuffer(memory, dtype=np.uint8))
