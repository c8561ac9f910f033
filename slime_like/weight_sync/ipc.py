"""Colocated transport on GPUs: each trainer rank gives the engine rank on its GPU the addresses of buckets in device memory."""

from __future__ import annotations

import asyncio
import datetime
import os
from collections.abc import Iterator, Sequence
from itertools import cycle
from typing import Any, Protocol

import torch.distributed as dist

from slime_like.config.schema.resolved import TransportSpec
from slime_like.errors import SlimeLikeError, WeightSyncError
from slime_like.interfaces import Bucket, ReplicatedWeightSource, TensorMeta, WeightReceiver, WeightSource
from slime_like.util.cuda_ipc import unshareable_memory, unshareable_memory_message
from slime_like.util.deadline import scale
from slime_like.weight_sync.device_memory import CudaHandles, DeviceBucketMemory, DeviceHandles
from slime_like.weight_sync.manifest import meta_of

# Messages that replace a bucket's message if the engine failed, if this rank failed, or if there are no more buckets.
LOST, UNWRITTEN, END = b"", b"unwritten", b"end"
SEND_S = 0.005  # wait that lets a request go out before the gathering of the next bucket blocks the event loop


class EngineRanks(Protocol):
    """Trainer ranks that share the GPUs of one engine, in the order of the engine's ranks."""

    @property
    def is_first(self) -> bool:
        """Return True on the rank that sends the requests."""
        ...

    def gather(self, message: bytes) -> list[bytes]:
        """Return the messages of all ranks, in order. This is a collective: every rank must call it."""
        ...


class SingleRank:
    """``EngineRanks`` of an engine with one rank."""

    is_first = True

    def gather(self, message: bytes) -> list[bytes]:
        return [message]


class MessageGroup:
    """``EngineRanks`` that exchange messages over a gloo group."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group

    @property
    def is_first(self) -> bool:
        return self._group.rank() == 0

    def gather(self, message: bytes) -> list[bytes]:
        messages: list[Any] = [b""] * self._group.size()
        dist.all_gather_object(messages, message, group=self._group)
        return messages


class _Delivery:
    """Delivery of one push's buckets from this rank to its engine. On a rank that has no engine, it does nothing.

    ``hand_over`` and ``finish`` are collectives over the trainer ranks of one engine.
    """

    def __init__(self, receiver: WeightReceiver | None, ranks: EngineRanks) -> None:
        self.error: BaseException | None = None  # error of this rank or, on the rank that sends requests, of the engine
        self._receiver, self._ranks = receiver, ranks
        self._request: asyncio.Task[None] | None = None
        self._last: DeviceBucketMemory | None = None  # memory of the last request
        self._has_failed = False

    async def hand_over(self, bucket: Bucket, memory: DeviceBucketMemory) -> None:
        """Give the engine a bucket, once it has replied to the request with the previous bucket. No-op after a failure."""
        if self._receiver is None or self._has_failed:
            return
        messages = await self._exchange(self._write(bucket, memory))
        if self._ranks.is_first and not self._has_failed:
            self._request = asyncio.create_task(self._receiver.update_from_tensors(*messages))
            await asyncio.wait([self._request], timeout=SEND_S * scale())
        self._last = memory

    async def finish(self) -> None:
        """Wait until the engine has copied the last bucket. No-op after a failure."""
        if self._receiver is not None and not self._has_failed:
            await self._exchange(END)

    def _write(self, bucket: Bucket, memory: DeviceBucketMemory) -> bytes:
        """Return the message for a bucket, or ``UNWRITTEN`` after an error.

        The error is stored, not raised, because the other trainer ranks of this engine wait for this rank's message.
        """
        try:
            return memory.write(bucket)
        except SlimeLikeError as error:
            self.error = error
        except RuntimeError as error:  # from CUDA: out of memory, or no handle
            self.error = WeightSyncError(
                f"trainer rank {dist.get_rank()} cannot share a bucket of weights with its engine: {error}; lower "
                "weights.bucket_mb, or set weights.transport=tensor"
            )
        return UNWRITTEN

    async def _exchange(self, message: bytes) -> list[bytes]:
        """Wait for the reply to the last request, then exchange ``message`` with the other trainer ranks of the engine.

        Return the messages of all these ranks; collective over them. If the last request failed, this rank sends LOST instead
        of ``message``. If any message is LOST or UNWRITTEN, every rank records a failure.
        """
        is_copied = await self.settle()
        messages = self._ranks.gather(message if is_copied else LOST)
        self._has_failed = LOST in messages or UNWRITTEN in messages
        if self._last is not None and LOST not in messages:
            self._last.confirm()
        return messages

    async def settle(self) -> bool:
        """Wait for the reply to the last request, and store its error, if any. Return False if the request failed, else True."""
        request, self._request = self._request, None
        if request is None:
            return True
        await asyncio.wait([request])
        error = request.exception()  # not raised: its traceback would keep the frames and tensors of this push alive
        if error is not None:
            self.error = error
        return error is None


class IpcSender:
    """Sender of every pipeline stage's tensors from this rank's GPU to the engine rank that uses the same GPU.

    All ranks gather all tensors. The first trainer rank of each engine posts one request per bucket, with the addresses from
    all trainer ranks on the engine's GPUs. It posts the next one after the reply, which an engine sends once its copies are
    complete. Two buffers suffice: one is read while the other is written.
    """

    def __init__(
        self,
        receivers: Sequence[WeightReceiver],
        *,
        transport: TransportSpec,
        group_name: str,
        host: str,
        handles: DeviceHandles | None = None,
    ) -> None:
        """Find this rank's engine.

        Raises ``WeightSyncError`` if an engine has no GPUs or a GPU that no trainer rank uses, or if torch's allocator is set to
        a kind of memory that CUDA IPC cannot share.
        """
        del group_name, host
        rank, world = dist.get_rank(), dist.get_world_size()
        for receiver in receivers:
            if not receiver.gpus or max(receiver.gpus) >= world:
                raise WeightSyncError(
                    f"the engine at {receiver.host} shares no GPUs with trainer ranks, which weights.transport=ipc needs: set "
                    "weights.transport=tensor"
                )
        if setting := unshareable_memory(os.environ):
            raise WeightSyncError(unshareable_memory_message(setting))
        self._receivers = receivers
        self._receiver = next((receiver for receiver in receivers if rank in receiver.gpus), None)
        self._transport = transport
        self._handles = CudaHandles() if handles is None else handles

    async def send(self, source: WeightSource) -> list[TensorMeta]:
        """Send all buckets. A collective over all trainer ranks.

        Return the metadata of the tensors of this rank's pipeline stage if ``source.is_sender`` (true on one rank of each
        stage), else an empty list. An error is raised only after the last bucket, because the other ranks gather every bucket
        with this one.
        """
        assert isinstance(source, ReplicatedWeightSource), "a trainer's rank can gather all weights"
        delivery = _Delivery(self._receiver, engine_ranks(self._receivers, self._transport.deadline_s))
        own_names = {meta.name for meta in source.manifest()} if source.is_sender else set[str]()
        memories = DeviceBucketMemory(self._handles), DeviceBucketMemory(self._handles)
        buckets = source.replicated_buckets(self._transport.max_bytes)
        try:
            metas = await _send_all(buckets, memories, delivery)
        finally:
            for _ in buckets:  # gathering is a collective: the other ranks need this one to complete it
                pass
            await delivery.settle()
            for memory in memories:
                memory.close()
        if delivery.error is not None:
            raise delivery.error
        return [meta for meta in metas if meta.name in own_names]

    async def close(self) -> None:
        """Close the connections."""
        await asyncio.gather(*(receiver.close() for receiver in self._receivers))


async def _send_all(
    buckets: Iterator[Bucket], memories: Sequence[DeviceBucketMemory], delivery: _Delivery
) -> list[TensorMeta]:
    """Deliver all buckets and return the metadata of their tensors. A collective over all trainer ranks.

    This is a separate function, so that its frame, which refers to tensors, ends before the caller releases the memory.
    """
    metas: list[TensorMeta] = []
    next_memories = cycle(memories)
    for bucket in buckets:
        await delivery.hand_over(bucket, next(next_memories))
        metas += [meta_of(name, tensor) for name, tensor in bucket.tensors]
        del bucket  # free it before the next one is gathered
    await delivery.finish()
    return metas


_groups: dict[tuple[dist.ProcessGroup, int], EngineRanks] = {}
"""This rank's group by (world, ranks per engine). Groups outlive senders, which ranks replace at different times."""


def engine_ranks(receivers: Sequence[WeightReceiver], seconds: float) -> EngineRanks:
    """Return the trainer ranks that share the GPUs of this rank's engine.

    If engines have several ranks, the first call is a collective over all trainer ranks, because it creates process groups.
    ``seconds`` is their timeout.
    """
    tp = receivers[0].tp if receivers else 1
    world = dist.group.WORLD
    if tp == 1 or world is None:
        return SingleRank()
    if (world, tp) not in _groups:
        timeout = datetime.timedelta(seconds=seconds * scale())
        ranks: EngineRanks = SingleRank()
        for first in range(0, dist.get_world_size() - tp + 1, tp):
            members = list(range(first, first + tp))
            group = dist.new_group(members, timeout=timeout, backend="gloo")
            if dist.get_rank() in members:
                assert isinstance(group, dist.ProcessGroup), "this rank is a member"
                ranks = MessageGroup(group)
        _groups[world, tp] = ranks
    return _groups[world, tp]
