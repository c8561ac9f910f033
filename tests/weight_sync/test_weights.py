"""Buckets of weights, the manifest of a push, and rendezvous of the broadcast transport."""

import asyncio
import io
import pickle
from collections.abc import Iterator
from datetime import timedelta

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from slime_like.config.schema.resolved import TransportSpec
from slime_like.errors import WeightSyncError
from slime_like.interfaces import Bucket, TensorMeta
from slime_like.util.by_bytes import by_bytes
from slime_like.util.deadline import FACTOR_VARIABLE
from slime_like.util.ports import RendezvousAddress
from slime_like.weight_sync import broadcast, manifest
from slime_like.weight_sync.manifest import meta_of
from slime_like.weight_sync.tensor import serialize


@given(st.lists(st.integers(1, 40), max_size=30), st.integers(1, 60))
def test_buckets_keep_order_and_bound(sizes: list[int], max_bytes: int) -> None:
    groups = list(by_bytes(list(enumerate(sizes)), max_bytes))
    assert [i for group in groups for i in group] == list(range(len(sizes)))
    for group in groups:
        assert sum(sizes[i] for i in group) <= max_bytes or len(group) == 1


def metas(*names: str) -> list[TensorMeta]:
    return [TensorMeta(name, (2, 3), "float32") for name in names]


def test_a_whole_push_passes() -> None:
    merged = manifest.merge([metas("a"), metas("b")])
    manifest.check(1, merged, metas("b", "a"))
    assert set(merged) == {"a", "b"}


def test_a_tensor_with_two_owners_is_refused() -> None:
    with pytest.raises(WeightSyncError, match="more than one pipeline stage would send a"):
        manifest.merge([metas("a"), metas("a")])


@pytest.mark.parametrize(
    "metas_sent",
    [metas("a"), metas("a", "b", "c"), metas("a", "a", "b"), [*metas("a"), TensorMeta("b", (3, 2), "float32")]],
)
def test_a_push_that_is_not_the_manifest_is_refused(metas_sent: list[TensorMeta]) -> None:
    with pytest.raises(WeightSyncError, match="push of version 4 is incomplete"):
        manifest.check(4, manifest.merge([metas("a", "b")]), metas_sent)


def test_a_view_does_not_drag_its_base_along() -> None:
    base = torch.arange(100_000, dtype=torch.float32)
    payload = serialize(Bucket((("w", base[:4]),)))
    assert len(payload) < 5_000
    ((name, tensor),) = pickle.Unpickler(io.BytesIO(payload)).load()  # noqa: S301
    assert name == "w"
    assert torch.equal(tensor, base[:4])
    assert meta_of(name, tensor) == TensorMeta("w", (4,), "float32")


def test_a_replaced_storage_loader_keeps_its_name(monkeypatch: pytest.MonkeyPatch) -> None:
    """megatron-core replaces the loader; an engine accepts it only under torch's name."""

    def replaced(b: bytes) -> object:
        return torch.load(io.BytesIO(b), weights_only=True)

    monkeypatch.setattr(torch.storage, "_load_from_bytes", replaced)
    payload = serialize(Bucket((("w", torch.ones(2)),)))
    assert b"torch.storage" in payload
    assert b"test_weights" not in payload


def test_the_factor_of_deadlines_scales_the_rendezvous(monkeypatch: pytest.MonkeyPatch) -> None:
    limits: list[timedelta] = []

    def refuse(address: RendezvousAddress, world: int, *, is_master: bool, timeout: timedelta) -> None:
        limits.append(timeout)
        raise ConnectionError

    monkeypatch.setenv(FACTOR_VARIABLE, "3")
    monkeypatch.setattr(broadcast, "join_store", refuse)
    transport = TransportSpec(kind="broadcast", backend="gloo", max_bytes=1, deadline_s=20)
    sender = broadcast.BroadcastSender([], transport=transport, group_name="scaled", host="127.0.0.1")
    with pytest.raises(ConnectionError):
        asyncio.run(sender.send(Stage()))
    assert limits == [timedelta(seconds=60)]


class Stage:
    """Weight source of a sending rank, without tensors."""

    is_sender = True

    def manifest(self) -> tuple[TensorMeta, ...]:
        return ()

    def buckets(self, max_bytes: int) -> Iterator[Bucket]:
        return iter(())
