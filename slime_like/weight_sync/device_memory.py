"""Buckets in GPU memory that another process on the same GPU opens by CUDA IPC, and the messages that describe them.

The receiver builds tensors from names, dtypes and shapes: it unpickles nothing.
"""

from __future__ import annotations

import gc
import json
from collections.abc import Mapping
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from slime_like.errors import WeightSyncError
from slime_like.interfaces import Bucket
from slime_like.util import cuda_ipc
from slime_like.weight_sync.shared import lay_out, view

MAGIC = b"slime_like device tensors\n"


class DeviceHandles(Protocol):
    """Access to the device memory of this process and, by address, of other processes."""

    def name(self) -> str:
        """Return a name of the current device that is the same in every process."""
        ...

    def allocate(self, num_bytes: int) -> Tensor:
        """Return new memory (uint8) that can be shared."""
        ...

    def share(self, memory: Tensor) -> Mapping[str, Any]:
        """Return an address of ``memory``. Each address can be opened once."""
        ...

    def open(self, address: Mapping[str, Any]) -> Tensor:
        """Return the memory (uint8) at an address."""
        ...

    def forget(self, address: Mapping[str, Any]) -> None:
        """Count an address as closed, because its receiver has exited or failed, or did not get the address."""
        ...

    def wait(self) -> None:
        """Wait for the work of the current stream."""
        ...

    def collect(self) -> None:
        """Free device memory that this process has dropped and its receivers have closed, for use by other processes."""
        ...


class CudaHandles:
    """``DeviceHandles`` of memory from torch's allocator, shared by CUDA IPC."""

    def name(self) -> str:
        return str(torch.cuda.get_device_properties(torch.cuda.current_device()).uuid)

    def allocate(self, num_bytes: int) -> Tensor:
        return torch.empty(num_bytes, dtype=torch.uint8, device="cuda")

    def share(self, memory: Tensor) -> Mapping[str, Any]:
        return cuda_ipc.share(memory)

    def open(self, address: Mapping[str, Any]) -> Tensor:
        return cuda_ipc.open_shared(address, torch.cuda.current_device())

    def forget(self, address: Mapping[str, Any]) -> None:
        cuda_ipc.forget(address)

    def wait(self) -> None:
        torch.cuda.current_stream().synchronize()

    def collect(self) -> None:
        torch.cuda.ipc_collect()
        torch.cuda.empty_cache()  # the engine allocates its KV cache after a push


class DeviceBucketMemory:
    """Memory for one bucket at a time. It grows to the largest bucket."""

    def __init__(self, handles: DeviceHandles) -> None:
        self._handles = handles
        self._bytes: Tensor | None = None
        self._address: Mapping[str, Any] | None = None  # address of the last bucket, until its receiver has closed it

    def write(self, bucket: Bucket) -> bytes:
        """Copy a bucket's tensors into the memory, and return the message for one ``OpenedBucket``.

        The receiver must have closed the previous bucket. Raises ``WeightSyncError`` if a dtype is not supported, and
        CUDA's ``RuntimeError`` if the memory cannot be allocated or shared.
        """
        entries, size = lay_out(bucket)
        if self._bytes is None or len(self._bytes) < size:
            self._bytes = None
            self._bytes = self._handles.allocate(max(size, 1))
        for (_, dtype, shape, offset), (_, tensor) in zip(entries, bucket.tensors, strict=True):
            view(self._bytes, dtype, shape, offset).copy_(tensor.detach(), non_blocking=True)
        self._address = dict(self._handles.share(self._bytes))
        self._handles.wait()
        return MAGIC + json.dumps({"gpu": self._handles.name(), "memory": self._address, "tensors": entries}).encode()

    def confirm(self) -> None:
        """Record that the receiver has closed the last bucket."""
        self._address = None

    def close(self) -> None:
        """Release the memory. Call this after the receiver has closed it or has exited."""
        if self._address is not None:
            self._handles.forget(self._address)
            self._address = None
        if self._bytes is not None:
            self._bytes = None
            self._handles.collect()


def is_message(payload: bytes) -> bool:
    """Return whether ``payload`` begins like a message of ``DeviceBucketMemory.write``."""
    return payload.startswith(MAGIC)


class OpenedBucket:
    """Tensors in the sender's memory. Copy them before ``close``."""

    def __init__(self, payload: bytes, handles: DeviceHandles) -> None:
        """Open the sender's memory that ``payload`` describes.

        Raises ``WeightSyncError`` if ``payload`` is malformed or from another GPU, or if the memory cannot be opened.
        """
        self._handles = handles
        try:
            message: Any = json.loads(payload[len(MAGIC) :])
            sender, receiver = str(message["gpu"]), handles.name()
            if sender != receiver:
                raise WeightSyncError(
                    f"the engine's rank is on GPU {receiver}, the trainer's rank that sends to it on GPU {sender}: set "
                    "weights.transport=tensor"
                )
            memory = handles.open(message["memory"])
            self._storage = StorageWeakRef(memory.untyped_storage())
            self.tensors = [(str(name), view(memory, *place)) for name, *place in message["tensors"]]
        except WeightSyncError:  # also a RuntimeError
            raise
        except (KeyError, TypeError, ValueError) as error:
            raise WeightSyncError(f"a message about device tensors is malformed: {error}") from error
        except RuntimeError as error:
            raise WeightSyncError(
                f"the engine cannot open the trainer's device memory ({error}): run both in one container, with one /dev/shm, or set "
                "weights.transport=tensor"
            ) from error

    def close(self) -> None:
        """Wait for the copies of the tensors, and close the memory. Raises ``WeightSyncError`` if a tensor is still in use."""
        self._handles.wait()
        self.tensors.clear()
        if not self._storage.expired():
            gc.collect()  # only a reference cycle, such as that of an exception, may still refer to a tensor
        if not self._storage.expired():
            raise WeightSyncError("the engine kept a tensor in the trainer's device memory instead of copying it")
