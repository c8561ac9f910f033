"""Fakes for the tensor transport: weights of a rank, and an engine."""

from __future__ import annotations

import asyncio
import io
import pickle
from collections.abc import Iterator

import torch

from slime_like.interfaces import Bucket, TensorMeta
from slime_like.util.by_bytes import by_bytes
from slime_like.weight_sync.manifest import meta_of
from slime_like.weight_sync.shared import is_message, map_tensors


class RankWeights:
    """Weights of one rank; the memory of a bucket is overwritten when the next one is requested."""

    is_sender = True

    def __init__(self, tensors: dict[str, torch.Tensor]) -> None:
        self._tensors = tensors
        self.num_buckets, self.has_ended = 0, False

    def manifest(self) -> tuple[TensorMeta, ...]:
        return tuple(meta_of(name, tensor) for name, tensor in self._tensors.items())

    def buckets(self, max_bytes: int) -> Iterator[Bucket]:
        stream = (((name, t.clone()), t.numel() * t.element_size()) for name, t in self._tensors.items())
        for group in by_bytes(stream, max_bytes):
            self.num_buckets += 1
            yield Bucket(tuple(group))
            for _, tensor in group:
                tensor.fill_(float("nan"))
        self.has_ended = True


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
