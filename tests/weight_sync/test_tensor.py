"""Tensor transport: buckets reach engines on this host through shared memory, and other engines in a request body."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
import torch

from slime_like.config.schema.resolved import TransportSpec
from slime_like.weight_sync.tensor import TensorSender
from tests.weight_sync.tensor_doubles import RankWeights, Receiver

LOCAL_HOST = "10.0.0.1"


def sender(*receivers: Any) -> TensorSender:
    spec = TransportSpec("tensor", "", 100, 10.0)
    return TensorSender(receivers, transport=spec, group_name="", host=LOCAL_HOST)


@pytest.fixture
def weights() -> dict[str, torch.Tensor]:
    return {f"w{i}": torch.full((10 + i,), float(i)) for i in range(7)}


def test_every_engine_gets_every_bucket(weights: dict[str, torch.Tensor]) -> None:
    local_receivers, remote_receivers = [Receiver(LOCAL_HOST), Receiver(LOCAL_HOST)], [Receiver("10.0.0.2")]
    tensor_sender = sender(*local_receivers, *remote_receivers)
    metas = asyncio.run(tensor_sender.send(RankWeights(weights)))
    asyncio.run(tensor_sender.close())
    assert metas == list(RankWeights(weights).manifest())
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
    assert source.has_ended
    asyncio.run(tensor_sender.close())
    assert other_engine.closed


def test_engines_of_other_machines_need_no_shared_memory_on_a_cpu(weights: dict[str, torch.Tensor]) -> None:
    receiver = Receiver("10.0.0.2")
    tensor_sender = sender(receiver)
    asyncio.run(tensor_sender.send(RankWeights(weights)))
    assert not any(region.bucket.tensors for region in tensor_sender._regions)  # pyright: ignore[reportPrivateUsage]
    assert all(torch.equal(receiver.tensors[name], tensor) for name, tensor in weights.items())
    asyncio.run(tensor_sender.close())
