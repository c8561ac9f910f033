"""Buckets reach engines of this machine through shared memory and others in a request, each whole, whenever it is read."""

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
from slime_like.weights.bucket import buckets
from slime_like.weights.shared import is_message, received
from slime_like.weights.stream import meta_of
from slime_like.weights.tensor import TensorSender

HERE = "10.0.0.1"


class Source:
    """Weights of one rank; each bucket's memory is written over when the next one is asked for."""

    is_sender = True

    def __init__(self, tensors: dict[str, torch.Tensor]) -> None:
        self._tensors = tensors
        self.num_asked, self.ended = 0, False

    def manifest(self) -> tuple[TensorMeta, ...]:
        return tuple(meta_of(name, tensor) for name, tensor in self._tensors.items())

    def buckets(self, max_bytes: int) -> Iterator[Bucket]:
        for bucket in buckets(((name, tensor.clone()) for name, tensor in self._tensors.items()), max_bytes):
            self.num_asked += 1
            yield bucket
            for _, tensor in bucket.tensors:
                tensor.fill_(float("nan"))
        self.ended = True


class Receiver:
    """Reads a message some turns of the event loop after it came."""

    def __init__(self, host: str, refuses: int = -1) -> None:
        self.host, self.tp = host, 1
        self.found: dict[str, torch.Tensor] = {}
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
            with received(payload) as tensors:
                self.found |= {name: tensor.clone() for name, tensor in tensors}
                del tensors
        else:
            self.found |= dict(pickle.Unpickler(io.BytesIO(payload)).load())  # noqa: S301


def sender(*receivers: Any) -> TensorSender:
    spec = TransportSpec("tensor", "", 100, 10.0)
    return TensorSender(receivers, transport=spec, group_name="", host=HERE)


@pytest.fixture
def weights() -> dict[str, torch.Tensor]:
    return {f"w{i}": torch.full((10 + i,), float(i)) for i in range(7)}


def test_every_engine_gets_every_bucket_whole(weights: dict[str, torch.Tensor]) -> None:
    near, far = [Receiver(HERE), Receiver(HERE)], [Receiver("10.0.0.2")]
    made = sender(*near, *far)
    sent = asyncio.run(made.send(Source(weights)))
    asyncio.run(made.close())
    assert sent == list(Source(weights).manifest())
    for receiver in (*near, *far):
        assert len(receiver.shared) > 2
        assert set(receiver.shared) == {receiver.host == HERE}
        assert receiver.found.keys() == weights.keys()
        assert all(torch.equal(receiver.found[name], tensor) for name, tensor in weights.items())


def test_an_engine_that_refuses_a_bucket_ends_the_push(weights: dict[str, torch.Tensor]) -> None:
    left = Receiver("10.0.0.2")
    made = sender(Receiver(HERE, refuses=1), left)
    source = Source(weights)
    with pytest.raises(ValueError, match="refused"):
        asyncio.run(made.send(source))
    assert source.num_asked > len(left.shared), "the ranks that gather with this one were left alone in it"
    assert source.ended
    asyncio.run(made.close())
    assert left.closed
