"""Colocated transport: engines on this machine get buckets through shared memory, other engines in a request body."""

from __future__ import annotations

import asyncio
import pickle
from collections.abc import Iterator, Sequence
from itertools import cycle
from typing import Any

import torch

from slime_like.config.schema.resolved import TransportSpec
from slime_like.interfaces import Bucket, TensorMeta, WeightReceiver, WeightSource
from slime_like.weight_sync.manifest import meta_of
from slime_like.weight_sync.shared import SharedBucketMemory


class TensorSender:
    """Sender of this rank's tensors to every engine. One bucket is in flight while the next one is gathered.

    An engine on this machine copies from shared memory (``shared``). An engine on another machine gets a pickle of
    ``[(name, host tensor)]``, the only form that SGLang's allow-listed unpickler accepts from a process outside the engine's
    process tree. Every tensor-parallel rank of an engine copies its slices.
    """

    def __init__(
        self, receivers: Sequence[WeightReceiver], *, transport: TransportSpec, group_name: str, host: str
    ) -> None:
        del group_name  # this transport needs no process group
        self._local = [receiver for receiver in receivers if receiver.host == host]
        self._remote = [receiver for receiver in receivers if receiver.host != host]
        self._max_bytes = transport.max_bytes
        self._regions = SharedBucketMemory(), SharedBucketMemory()  # one is read while the other is written

    async def send(self, source: WeightSource) -> list[TensorMeta]:
        """Send all buckets of ``source`` in order, and return the metadata of the tensors.

        A collective over the ranks of a pipeline stage. Ranks other than the stage's sender send nothing and return an
        empty list.
        """
        metas: list[TensorMeta] = []
        buckets = source.buckets(self._max_bytes)
        try:
            if source.is_sender:
                await self._send(buckets, metas)
        finally:
            for _ in buckets:  # gathering is a collective of the stage: the other ranks need this one to complete it
                pass
        return metas

    async def _send(self, buckets: Iterator[Bucket], metas: list[TensorMeta]) -> None:
        """Send the buckets and append the metadata of their tensors to ``metas``."""
        in_flight: list[asyncio.Task[None]] = []
        regions = cycle(self._regions)
        try:
            for bucket in buckets:
                messages = self._messages(bucket, next(regions))
                await asyncio.gather(*in_flight)
                in_flight = [
                    asyncio.create_task(receiver.update_from_tensors(message))
                    for receivers, message in messages
                    for receiver in receivers
                ]
                await asyncio.sleep(0)
                metas += [meta_of(name, tensor) for name, tensor in bucket.tensors]
            await asyncio.gather(*in_flight)
        finally:  # an engine may still be reading the memory that the next push writes
            await asyncio.gather(*in_flight, return_exceptions=True)

    async def close(self) -> None:
        """Release the shared memory and close the connections."""
        for region in self._regions:
            region.close()
        await asyncio.gather(*(receiver.close() for receiver in (*self._local, *self._remote)))

    def _messages(self, bucket: Bucket, region: SharedBucketMemory) -> list[tuple[Sequence[WeightReceiver], bytes]]:
        """Return (engines, message) pairs for ``bucket``.

        The bucket is copied into ``region`` if an engine is on this machine or a tensor is on a GPU.
        """
        messages: list[tuple[Sequence[WeightReceiver], bytes]] = []
        if self._local or any(tensor.is_cuda for _, tensor in bucket.tensors):
            messages.append((self._local, region.write(bucket)))
            bucket = region.bucket  # remote engines get this copy too: the GPU is read once, to page-locked memory
        if self._remote:
            messages.append((self._remote, serialize(bucket)))
        return messages


def serialize(bucket: Bucket) -> bytes:
    """Return a pickle of a bucket whose tensors are in host memory.

    The tensors are cloned first, because the pickle of a view includes its entire storage.
    """
    _name_storage_loader()
    host_tensors = [(name, tensor.detach().clone().contiguous()) for name, tensor in bucket.tensors]
    return pickle.dumps(host_tensors, protocol=pickle.HIGHEST_PROTOCOL)


def _name_storage_loader() -> None:
    """Restore the name under which pickles refer to torch's storage loader.

    megatron.core.safe_globals replaces the loader with a function whose name SGLang's unpickler refuses. Only that name
    is changed here. Remove this function once megatron-core no longer replaces ``torch.storage._load_from_bytes``.
    """
    loader: Any = torch.storage._load_from_bytes  # pyright: ignore[reportPrivateUsage]  pickles hold this name
    loader.__module__, loader.__qualname__ = "torch.storage", "_load_from_bytes"
