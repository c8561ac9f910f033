"""Tensor transport: buckets reach engines of this host through shared memory and others in a request, always complete."""

from __future__ import annotations

import asyncio
import io
import pickle
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from slime_like.config.schema.resolved import TransportSpec
from slime_like.interfaces import Bucket, TensorMeta
from slime_like.util.by_bytes import by_bytes
from slime_like.weight_sync.manifest import meta_of
from slime_like.weight_sync.shared import is_message, map_tensors
from slime_like.weight_sync.tensor import TensorSender

LOCAL_HOST = "10.0.0.1"


class RankWeights:
    """Weights of one rank; the memory of a bucket is overwritten when the next one is requested."""

    is_sender = True

    def __init__(self, tensors: dict[str, torch.Tensor]) -> None:
        self._tensors = tensors
        self.num_buckets, self.ended = 0, False

    def manifest(self) -> tuple[TensorMeta, ...]:
        return tuple(meta_of(name, tensor) for name, tensor in self._tensors.items())

    def buckets(self, max_bytes: int) -> Iterator[Bucket]:
        stream = (((name, t.clone()), t.numel() * t.element_size()) for name, t in self._tensors.items())
        for group in by_bytes(stream, max_bytes):
            self.num_buckets += 1
            yield Bucket(tuple(group))
            for _, tensor in group:
                tensor.fill_(float("nan"))
        self.ended = True


class Receiver:
    """Fake engine that reads a message some event loop iterations after its arrival."""

    def __init__(self, host: str, refuses: int = -1) -> None:
        self.host, self.tp = host, 1
        self.tensors: dict[str, torch.Tensor] = {}
        self.shared: list[bool] = []
        self.closed = False
        self._refuses = refuses

    async def close(self) -> None:
        self.closed = True

    async def update_from_tensors(self, payload: bytes) -> None:
        for _ in range(5):
            await asyncio.sleep(0)
        if len(self.shared) == self._refuses:
            raise ValueError("refused")
        self.shared.append(is_message(payload))
        if self.shared[-1]:
            with map_tensors(payload) as tensors:
                self.tensors |= {name: tensor.clone() for name, tensor in tensors}
                del tensors
        else:
            self.tensors |= dict(pickle.Unpickler(io.BytesIO(payload)).load())  # noqa: S301


def sender(*receivers: Any) -> TensorSender:
    spec = TransportSpec("tensor", "", 100, 10.0)
    return TensorSender(receivers, transport=spec, group_name="", host=LOCAL_HOST)


@pytest.fixture
def weights() -> dict[str, torch.Tensor]:
    return {f"w{i}": torch.full((10 + i,), float(i)) for i in range(7)}


def test_every_engine_gets_every_bucket(weights: dict[str, torch.Tensor]) -> None:
    local_receivers, remote_receivers = [Receiver(LOCAL_HOST), Receiver(LOCAL_HOST)], [Receiver("10.0.0.2")]
    tensor_sender = sender(*local_receivers, *remote_receivers)
    sent = asyncio.run(tensor_sender.send(RankWeights(weights)))
    asyncio.run(tensor_sender.close())
    assert sent == list(RankWeights(weights).manifest())
    for receiver in (*local_receivers, *remote_receivers):
        assert len(receiver.shared) > 2
        assert set(receiver.shared) == {receiver.host == LOCAL_HOST}
        assert receiver.tensors.keys() == weights.keys()
        assert all(torch.equal(receiver.tensors[name], tensor) for name, tensor in weights.items())


def test_an_engine_that_refuses_a_bucket_ends_the_push(weights: dict[str, torch.Tensor]) -> None:
    other_engine = Receiver("10.0.0.2")
    tensor_sender = sender(Receiver(LOCAL_HOST, refuses=1), other_engine)
    source = RankWeights(weights)
    with pytest.raises(ValueError, match="refused"):
        asyncio.run(tensor_sender.send(source))
    assert source.num_buckets > len(other_engine.shared), (
        "the source must be drained, because other ranks gather with this one"
    )
    assert source.ended
    asyncio.run(tensor_sender.close())
    assert other_engine.closed
