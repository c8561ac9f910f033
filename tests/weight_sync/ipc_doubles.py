"""Fakes for the CUDA IPC transport: memory addresses within one process, weights, an engine, and trainer ranks."""

from __future__ import annotations

import asyncio
import itertools
import queue
import threading
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import torch

from slime_like.interfaces import Bucket, TensorMeta
from slime_like.util.by_bytes import by_bytes
from slime_like.weight_sync.device_memory import DeviceHandles, OpenedBucket
from slime_like.weight_sync.manifest import meta_of

NUMBERS = itertools.count()


class LoadReply(NamedTuple):
    """Reply of SGLang to an update with tensors."""

    success: bool
    message: str


class HostHandles:
    """Fake ``DeviceHandles`` over host memory. As with CUDA IPC, an address can be opened once."""

    shared: dict[int, torch.Tensor] = {}  # noqa: RUF012  common to all instances, as CUDA's handles are

    def __init__(self, gpu: str = "GPU-0") -> None:
        self.gpu = gpu
        self.allocated: list[int] = []
        self.waits = self.collections = 0
        self.capacity = -1  # number of allocations; -1: unlimited

    def name(self) -> str:
        return self.gpu

    def allocate(self, num_bytes: int) -> torch.Tensor:
        if len(self.allocated) == self.capacity:
            raise torch.OutOfMemoryError("CUDA out of memory")
        self.allocated.append(num_bytes)
        return torch.empty(num_bytes, dtype=torch.uint8)

    def share(self, memory: torch.Tensor) -> Mapping[str, Any]:
        number = next(NUMBERS)
        self.shared[number] = memory
        return {"number": number}

    def open(self, address: Mapping[str, Any]) -> torch.Tensor:
        return torch.from_dlpack(self.shared.pop(address["number"]))  # a separate storage over the same bytes

    def forget(self, address: Mapping[str, Any]) -> None:
        del self.shared[address["number"]]

    def wait(self) -> None:
        self.waits += 1

    def collect(self) -> None:
        self.collections += 1


class CopiedBytes(HostHandles):
    """Fake handles whose addresses contain the bytes themselves, so that other processes can open them."""

    def share(self, memory: torch.Tensor) -> Mapping[str, Any]:
        return {"contents": bytes(memory.tolist()).hex()}

    def open(self, address: Mapping[str, Any]) -> torch.Tensor:
        return torch.frombuffer(bytearray.fromhex(address["contents"]), dtype=torch.uint8)


class StageWeights:
    """Weight source of a rank of one pipeline stage; ``replicated_buckets`` yields the tensors of all stages."""

    def __init__(self, stages: list[dict[str, torch.Tensor]], stage: int = 0, is_sender: bool = True) -> None:
        self._stages, self._stage, self.is_sender = stages, stage, is_sender
        self.has_ended = False

    def manifest(self) -> tuple[TensorMeta, ...]:
        return tuple(meta_of(name, tensor) for name, tensor in self._stages[self._stage].items())

    def buckets(self, max_bytes: int) -> Iterator[Bucket]:
        raise NotImplementedError

    def replicated_buckets(self, max_bytes: int) -> Iterator[Bucket]:
        for tensors in self._stages:
            stream = (((name, t.clone()), t.numel() * t.element_size()) for name, t in tensors.items())
            for group in by_bytes(stream, max_bytes):
                yield Bucket(tuple(group))
                for _, tensor in group:
                    tensor.fill_(float("nan"))
        self.has_ended = True


class DeviceEngine:
    """Fake engine whose ranks copy a bucket about 10 ms after the request."""

    def __init__(self, gpus: tuple[int, ...], handles: DeviceHandles, fails_at: int = -1, error: Any = None) -> None:
        self.gpus, self.tp, self.host = gpus, len(gpus), "127.0.0.1"
        self._handles, self._fails_at, self._error = handles, fails_at, error
        self.ranks: list[dict[str, torch.Tensor]] = [{} for _ in gpus]
        self.num_requests, self.closed = 0, False

    async def update_from_tensors(self, *payloads: bytes) -> None:
        assert len(payloads) == self.tp
        for _ in range(5):
            await asyncio.sleep(0.002)
        self.num_requests += 1
        if self.num_requests == self._fails_at:
            raise self._error
        for tensors, payload in zip(self.ranks, payloads, strict=True):
            bucket = OpenedBucket(payload, self._handles)
            tensors |= {name: tensor.clone() for name, tensor in bucket.tensors}
            bucket.close()

    async def close(self) -> None:
        self.closed = True


class ThreadRanks:
    """Trainer ranks of one engine, each in a thread."""

    def __init__(self, rank: int, size: int, barrier: threading.Barrier, messages: list[bytes]) -> None:
        self._rank, self._size, self._barrier, self._messages = rank, size, barrier, messages

    @classmethod
    def of(cls, size: int) -> list[ThreadRanks]:
        barrier, messages = threading.Barrier(size, timeout=20), [b""] * size
        return [cls(rank, size, barrier, messages) for rank in range(size)]

    @property
    def is_first(self) -> bool:
        return self._rank == 0

    def gather(self, message: bytes) -> list[bytes]:
        self._messages[self._rank] = message
        self._barrier.wait()
        gathered = list(self._messages)
        self._barrier.wait()
        return gathered


def in_threads(functions: list[Any]) -> list[Any]:
    """Call the functions concurrently; return the result or the exception of each."""
    results: queue.Queue[tuple[int, Any]] = queue.Queue()

    def run(index: int, function: Any) -> None:
        try:
            results.put((index, function()))
        except Exception as error:  # noqa: BLE001  the test compares it
            results.put((index, error))

    for index, function in enumerate(functions):
        threading.Thread(target=run, args=(index, function), daemon=True).start()
    return [result for _, result in sorted((results.get(timeout=30) for _ in functions), key=lambda item: item[0])]
