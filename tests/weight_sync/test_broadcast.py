"""Broadcast transport with fake NCCL groups, in which a broadcast to a lost engine ends only by an abort."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable, Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from slime_like.config.schema.resolved import TransportSpec
from slime_like.errors import EngineLost
from slime_like.interfaces import Bucket, TensorMeta
from slime_like.weight_sync import broadcast
from slime_like.weight_sync.broadcast import BroadcastSender

BUCKET = Bucket((("a", torch.ones(3)),))
WAIT_S = 20.0


class HangingGroup:
    """Group whose broadcasts wait for a lost engine."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.begun = threading.Event()
        self._aborted, self._ended = threading.Event(), threading.Event()

    def broadcast(self) -> None:
        self.begun.set()
        assert self._aborted.wait(WAIT_S)
        self._ended.set()

    def abort(self) -> None:
        self.calls.append("abort")
        self._aborted.set()

    def release(self) -> None:
        """End the waiting broadcasts if they were not aborted."""
        self._aborted.set()

    def destroy(self) -> None:
        """Leave the group after its ops have ended, as NCCL does."""
        assert self._ended.wait(WAIT_S)
        self.calls.append("destroy")


class BrokenGroup(HangingGroup):
    """Group that can neither be aborted nor left, like a communicator in an error state."""

    def abort(self) -> None:
        super().abort()
        raise RuntimeError("NCCL error: unhandled system error")

    def destroy(self) -> None:
        super().destroy()
        raise RuntimeError("NCCL error: communicator was aborted")


class LostEngine:
    host, tp = "127.0.0.1", 1

    async def update_from_broadcast(self, metas: Sequence[TensorMeta], group_name: str) -> None:
        raise EngineLost("engine 0 is lost")

    async def destroy_broadcast_group(self, group_name: str) -> None: ...

    async def close(self) -> None: ...


class BusyEngine(LostEngine):
    async def update_from_broadcast(self, metas: Sequence[TensorMeta], group_name: str) -> None:
        await asyncio.sleep(WAIT_S)


def hanging_sender(monkeypatch: pytest.MonkeyPatch, group: HangingGroup, engine: LostEngine) -> BroadcastSender:
    """Return a sender that broadcasts to ``engine`` in ``group``, which hangs."""
    receiver: Any = engine
    hanging: Any = group
    monkeypatch.setattr(broadcast, "_broadcast", lambda group, bucket: group.broadcast())
    monkeypatch.setattr(broadcast, "LEAVE_S", 2.0)
    monkeypatch.setattr(dist, "destroy_process_group", lambda group: group.destroy())
    transport = TransportSpec(kind="broadcast", backend="nccl", max_bytes=1, deadline_s=20)
    sender = BroadcastSender([receiver], transport=transport, group_name="lost", host="127.0.0.1")
    sender._group = hanging
    return sender


def push_to_lost_engine(
    monkeypatch: pytest.MonkeyPatch, group: HangingGroup, push: Callable[[BroadcastSender], Awaitable[object]]
) -> None:
    """Assert that ``push`` raises ``EngineLost`` although its broadcast in ``group`` hangs, then close the sender."""
    sender = hanging_sender(monkeypatch, group, LostEngine())

    async def run() -> None:
        with pytest.raises(EngineLost, match="engine 0 is lost"):
            await push(sender)
        await sender.close()

    try:
        asyncio.run(run())
    finally:
        group.release()


def test_the_broadcast_to_a_lost_engine_is_aborted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the abort, NCCL's watchdog would end the trainer's process at the timeout of the group."""
    group = HangingGroup()
    push_to_lost_engine(monkeypatch, group, lambda sender: sender._send_bucket(BUCKET))
    assert group.calls == ["abort", "destroy"]


def test_the_broadcast_is_aborted_before_other_buckets_are_gathered(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU, the next gather would wait for the broadcast to the lost engine until the timeout of the group."""
    group = HangingGroup()

    class ThreeBuckets:
        is_sender = True

        def buckets(self, max_bytes: int) -> Iterator[Bucket]:
            for _ in range(3):
                group.calls.append("gather")
                yield BUCKET

    source: Any = ThreeBuckets()
    push_to_lost_engine(monkeypatch, group, lambda sender: sender.send(source))
    assert group.calls == ["gather", "abort", "gather", "gather", "destroy"]


def test_a_failed_abort_does_not_replace_the_loss_of_an_engine(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The driver repeats a push after a lost engine, and ends the run after any other error."""
    group = BrokenGroup()
    push_to_lost_engine(monkeypatch, group, lambda sender: sender.send(one_bucket()))
    assert group.calls == ["abort", "destroy"]
    error = capsys.readouterr().err
    assert "the group lost of engines and trainer could not be aborted: NCCL error: unhandled system error" in error
    assert "could not be left: NCCL error: communicator was aborted" in error


def test_a_cancelled_push_aborts_its_broadcast(monkeypatch: pytest.MonkeyPatch) -> None:
    group = HangingGroup()
    sender = hanging_sender(monkeypatch, group, BusyEngine())

    async def run() -> None:
        push = asyncio.create_task(sender.send(one_bucket()))
        await asyncio.to_thread(group.begun.wait, WAIT_S)
        push.cancel()
        with pytest.raises(asyncio.CancelledError):
            await push
        assert group.calls == ["abort"]
        for request in sender._unfinished_requests:
            request.cancel()
        await sender.close()

    try:
        asyncio.run(run())
    finally:
        group.release()
    assert group.calls == ["abort", "destroy"]


def one_bucket() -> Any:
    """Return a weight source with one bucket."""
    return SimpleNamespace(is_sender=True, buckets=lambda max_bytes: iter([BUCKET]))
