"""Transport for split placement: each pipeline stage's sender broadcasts buckets in a process group with all engine ranks."""

# torch has no public function that creates a process group outside the world.
# pyright: reportPrivateUsage=false
from __future__ import annotations

import asyncio
import contextlib
import datetime
import sys
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from slime_like.config.schema.resolved import TransportSpec
from slime_like.distributed.gloo_device import GlooConnections
from slime_like.distributed.rendezvous import join_store, keep_to_interface
from slime_like.distributed.wrapper import install
from slime_like.errors import EngineLost, WeightSyncError
from slime_like.interfaces import Bucket, TensorMeta, WeightReceiver, WeightSource
from slime_like.printable import visible
from slime_like.util.concurrency import run_in_thread
from slime_like.util.deadline import scale
from slime_like.util.ports import RendezvousAddress, open_rendezvous
from slime_like.weight_sync.manifest import meta_of

LEAVE_S = 10.0  # time limit for this rank and the engines to leave or abort a group
POLL_S = 0.02


class BroadcastSender:
    """Sender that broadcasts this rank's tensors. The engines join its group once, at the first push."""

    def __init__(
        self, receivers: Sequence[WeightReceiver], *, transport: TransportSpec, group_name: str, host: str
    ) -> None:
        self._receivers = receivers
        self._transport = transport
        self._name = group_name
        self._host = host
        self._store: dist.Store | None = None  # rendezvous of the group; must outlive the group
        self._group: dist.ProcessGroup | None = None
        self._connections: GlooConnections | None = None  # connections of a group over gloo
        self._timeout = datetime.timedelta(
            seconds=transport.deadline_s * scale()
        )  # for the store and for each broadcast
        self._members = list(receivers)  # engines of the group that are not known to be lost
        self._unfinished_requests: set[asyncio.Task[None]] = set()  # of a bucket that failed on one engine
        self._is_broadcasting = False  # True if the broadcast of that bucket is unfinished
        self._is_aborted = False

    async def send(self, source: WeightSource) -> list[TensorMeta]:
        """Send all buckets of ``source`` in order, and return the metadata of the tensors.

        A collective over the ranks of a pipeline stage. Ranks other than the stage's sender send nothing and return an
        empty list. An error is raised only after the last bucket, because the other ranks gather every bucket with this one.
        """
        tensors: list[TensorMeta] = []
        buckets = source.buckets(self._transport.max_bytes)
        try:
            if source.is_sender and self._group is None:
                self._group = await self._join()
            for bucket in buckets:
                if source.is_sender:
                    tensors += await self._send_bucket(bucket)
        except BaseException:
            await self._abort_unfinished()  # before further gathering, which on a GPU would wait for the broadcast
            raise
        finally:
            for _ in buckets:  # gathering is a collective of the stage: the other ranks need this one to complete it
                pass
        return tensors

    async def _send_bucket(self, bucket: Bucket) -> list[TensorMeta]:
        group = self._group
        assert group is not None, "send creates the group before the first bucket"
        metas = [meta_of(name, tensor) for name, tensor in bucket.tensors]
        requests = [
            asyncio.create_task(receiver.update_from_broadcast(metas, self._name)) for receiver in self._receivers
        ]
        broadcast = asyncio.create_task(run_in_thread(_broadcast, group, bucket))
        done_tasks: set[asyncio.Task[None]] = set()
        try:
            done_tasks, _ = await asyncio.wait([*requests, broadcast], return_when=asyncio.FIRST_EXCEPTION)
        finally:  # even if this push is cancelled, so that ``send`` aborts the unfinished ops
            self._members = [
                receiver for receiver, request in zip(self._receivers, requests, strict=True) if not _is_lost(request)
            ]
            self._unfinished_requests = {request for request in requests if not request.done()}
            self._is_broadcasting = not broadcast.done()
            # The broadcast's thread may wait for a lost engine until the group's timeout: nothing can interrupt a send of gloo.
            broadcast.cancel()
        # Raise an engine's own error first: a broadcast that fails too does so because the engine broke its connection.
        for task in sorted(done_tasks, key=lambda task: task is broadcast):
            task.result()
        assert not self._unfinished_requests, "asyncio.wait returned before all tasks were done, but no task raised"
        return metas

    async def _join(self) -> dist.ProcessGroup:
        """Create and return a group of this rank, as rank 0, and the ranks of all engines in order."""
        keep_to_interface(self._host)
        return await self._join_groups(open_rendezvous(self._host))

    async def _join_groups(self, address: RendezvousAddress) -> dist.ProcessGroup:
        """Create the group on this rank while all engines join it.

        Raises the first error, such as ``EngineLost``, after releasing the engines that wait for the one that failed.
        """
        world = 1 + sum(receiver.tp for receiver in self._receivers)
        self._store = join_store(address, world, is_master=True, timeout=self._timeout)
        offsets = [1 + sum(r.tp for r in self._receivers[:i]) for i in range(len(self._receivers))]
        joins = [
            asyncio.create_task(
                receiver.init_broadcast_group(
                    address.host, address.port, offset, world, self._name, self._transport.backend
                )
            )
            for receiver, offset in zip(self._receivers, offsets, strict=True)
        ]
        group_task = asyncio.create_task(run_in_thread(self._make_group, address, world))
        tasks: list[asyncio.Task[Any]] = [*joins, group_task]
        try:
            done_tasks, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
            for task in done_tasks:
                task.result()
        except BaseException:
            await self._release(joins, group_task)
            raise
        return group_task.result()

    async def _release(self, joins: Sequence[asyncio.Task[None]], group_task: asyncio.Task[Any]) -> None:
        """Close the store and the connections, which releases the ranks that wait for a lost engine, and await the joins.

        Only connected ranks notice that the store is closed, so wait first until all live ranks have connected. Each of the two
        waits ends after ``LEAVE_S`` at the latest.
        """
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(LEAVE_S * scale()):
                while self._store is not None and self._store.num_keys() < self._expected_keys(joins):
                    await asyncio.sleep(POLL_S)
        self._store = None
        if self._connections is not None:
            self._connections.close()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(LEAVE_S * scale()):
                await asyncio.gather(*joins, group_task, return_exceptions=True)

    def _expected_keys(self, joins: Sequence[asyncio.Task[None]]) -> int:
        """Return how many keys the store contains after all live ranks have connected: one per rank, and one shared key."""
        live_tps = [receiver.tp for receiver, join in zip(self._receivers, joins, strict=True) if not join.done()]
        return 2 + sum(live_tps)

    def _make_group(self, address: RendezvousAddress, world: int) -> dist.ProcessGroup:
        """Create a group outside the trainer's world. torch has only a private helper for it, which SGLang calls too.

        Remove this function once torch can create a process group with a store other than the default group's.
        """
        # A separate client: with the server's store object, this thread would keep the server alive.
        store: Any = join_store(address, world, is_master=False, timeout=self._timeout)
        helper: Any = distributed_c10d._new_process_group_helper
        prefixed, backend = dist.PrefixStore(self._name, store), self._transport.backend
        self._connections = GlooConnections() if backend == "gloo" else None
        options = None if self._connections is None else self._connections.options
        group, _ = helper(world, 0, [], backend, prefixed, self._name, options, self._timeout)
        distributed_c10d._world.pg_group_ranks[group] = {rank: rank for rank in range(world)}
        install.label_group(self._name, "weights")
        return group

    async def close(self) -> None:
        """Leave the group, so that the engines can join another one, and close the connections.

        This rank leaves first, which releases engines that wait in an unfinished broadcast. A broadcast that waits for a lost
        engine is aborted: NCCL does not leave a group before its ops have ended, and its watchdog would end this process.
        """
        await self._abort_unfinished()
        if self._group is not None:
            group, self._group, self._store = self._group, None, None
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(LEAVE_S * scale()):
                    await run_in_thread(_destroy, group)
                    await asyncio.gather(*self._unfinished_requests, return_exceptions=True)
                    leave = (receiver.destroy_broadcast_group(self._name) for receiver in self._members)
                    await asyncio.gather(*leave, return_exceptions=True)
        await asyncio.gather(*(receiver.close() for receiver in self._receivers))

    async def _abort_unfinished(self) -> None:
        """Abort the group if one of its ops may be waiting for a lost engine. Idempotent."""
        if self._group is None or self._is_aborted or not (self._unfinished_requests or self._is_broadcasting):
            return
        self._is_aborted = True
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(LEAVE_S * scale()):
                await run_in_thread(self._abort, self._group)

    def _abort(self, group: dist.ProcessGroup) -> None:
        """Abort the unfinished ops of the group, so that they fail.

        If the abort fails, only report it: the caller already has the error that ended the push.
        """
        try:
            if self._connections is not None:
                self._connections.close()
            else:
                group.abort()
        except (RuntimeError, OSError) as error:
            _report(f"the group {self._name} of engines and trainer could not be aborted: {error}")


def _destroy(group: dist.ProcessGroup) -> None:
    """Leave a group. An error is printed, not raised, because the group may have been aborted."""
    try:
        dist.destroy_process_group(group)
    except RuntimeError as error:
        _report(f"a group of engines and trainer could not be left: {error}")


def _report(text: str) -> None:
    sys.stderr.write(visible(f"slime_like: {text}\n"))
    sys.stderr.flush()


def _is_lost(request: asyncio.Task[None]) -> bool:
    """Return True if the request has failed because its engine is lost."""
    return request.done() and isinstance(request.exception(), EngineLost)


def _broadcast(group: dist.ProcessGroup, bucket: Bucket) -> None:
    """Broadcast all tensors of a bucket concurrently from rank 0 of ``group``.

    Raises ``EngineLost`` if a broadcast fails, as it does once an engine has left the group, and ``WeightSyncError`` if one
    does not complete.
    """
    try:
        works = [
            dist.broadcast(tensor.detach().contiguous(), group=group, group_src=0, async_op=True)
            for _, tensor in bucket.tensors
        ]
        for work in works:
            assert work is not None, "this rank is in the group"
            if not work.wait():
                raise WeightSyncError(
                    "a broadcast of weights to the engines did not complete; see the logs of the engines"
                )
    except RuntimeError as error:
        if isinstance(error, WeightSyncError):
            raise
        raise EngineLost(f"an engine left the broadcast of weights: {error}") from error
    if bucket.tensors[0][1].is_cuda:
        torch.cuda.synchronize()
