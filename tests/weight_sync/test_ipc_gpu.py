"""CUDA IPC transport between two processes on one GPU: values over several pushes, memory, and the rate of a push.

Needs torch and pytest only:

    python -m pytest -q --noconftest -m gpu tests/weight_sync/test_ipc_gpu.py
"""

from __future__ import annotations

import asyncio
import sys
import time
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

sys.path[:0] = [str(Path(__file__).resolve().parents[2])]  # not installed on every machine with a GPU

import pytest  # noqa: E402
import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402

from slime_like.config.schema.resolved import TransportSpec  # noqa: E402
from slime_like.errors import EngineLost  # noqa: E402
from slime_like.interfaces import Bucket, TensorMeta  # noqa: E402
from slime_like.util.by_bytes import by_bytes  # noqa: E402
from slime_like.weight_sync.device_memory import CudaHandles, OpenedBucket  # noqa: E402
from slime_like.weight_sync.ipc import IpcSender  # noqa: E402
from slime_like.weight_sync.manifest import meta_of  # noqa: E402
from tests.gpu_processes import forking_context  # noqa: E402
from tests.values import has_values  # noqa: E402

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]
MIB = 2**20
REPLY_S = 120.0


class DeviceWeights:
    """Weights of a single trainer rank on its GPU. Buckets contain copies, as they do of gathered tensors."""

    is_sender = True

    def __init__(self, tensors: dict[str, torch.Tensor]) -> None:
        self._tensors = tensors

    def manifest(self) -> tuple[TensorMeta, ...]:
        return tuple(meta_of(name, tensor) for name, tensor in self._tensors.items())

    def buckets(self, max_bytes: int) -> Iterator[Bucket]:
        raise NotImplementedError

    def replicated_buckets(self, max_bytes: int) -> Iterator[Bucket]:
        stream = (((name, t.clone()), t.numel() * t.element_size()) for name, t in self._tensors.items())
        for group in by_bytes(stream, max_bytes):
            yield Bucket(tuple(group))


def serve(requests: Any, replies: Any, shapes: dict[str, tuple[tuple[int, ...], torch.dtype]]) -> None:
    """Copy each bucket into parameters, as an engine does; reply with a checksum of each parameter on demand."""
    torch.cuda.set_device(0)
    parameters = {name: torch.zeros(shape, dtype=dtype, device="cuda") for name, (shape, dtype) in shapes.items()}
    replies.put("ready")
    while (payload := requests.get()) is not None:
        if payload == b"bits":
            replies.put({name: bits(parameter) for name, parameter in parameters.items()})
            continue
        bucket = OpenedBucket(payload, CudaHandles())
        copy_into(parameters, bucket)
        bucket.close()
        replies.put("copied")


def copy_into(parameters: dict[str, torch.Tensor], bucket: OpenedBucket) -> None:
    for name, tensor in bucket.tensors:
        parameters[name].copy_(tensor)


def bits(tensor: torch.Tensor) -> int:
    """Return a checksum of a tensor's bytes."""
    return zlib.crc32(tensor.contiguous().flatten().view(torch.uint8).cpu().numpy())


class EngineProcess:
    """Engine with one rank in another process on the same GPU."""

    gpus, tp, host = (0,), 1, "127.0.0.1"

    def __init__(self, tensors: dict[str, torch.Tensor]) -> None:
        context = forking_context()
        self._requests, self._replies = context.SimpleQueue(), context.Queue()
        shapes = {name: (tuple(tensor.shape), tensor.dtype) for name, tensor in tensors.items()}
        self.process = context.Process(target=serve, args=(self._requests, self._replies, shapes), daemon=True)
        self.process.start()
        assert self._replies.get(timeout=REPLY_S) == "ready"
        self.fails = False

    async def update_from_tensors(self, payload: bytes) -> None:
        if self.fails:
            raise EngineLost("the engine is lost")
        self._requests.put(payload)
        await asyncio.to_thread(self._replies.get, timeout=REPLY_S)

    def bits(self) -> dict[str, int]:
        self._requests.put(b"bits")
        return self._replies.get(timeout=REPLY_S)

    async def close(self) -> None: ...

    def stop(self) -> None:
        self._requests.put(None)
        self.process.join(30)
        self.process.kill()


@pytest.fixture
def world(tmp_path: Path) -> Iterator[None]:
    torch.cuda.set_device(0)
    dist.init_process_group("gloo", init_method=f"file://{tmp_path / 'store'}", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def push(engine: EngineProcess, tensors: dict[str, torch.Tensor], max_bytes: int) -> list[TensorMeta]:
    receiver: Any = engine
    sender = IpcSender([receiver], transport=TransportSpec("ipc", "nccl", max_bytes, REPLY_S), group_name="", host="")
    return asyncio.run(sender.send(DeviceWeights(tensors)))


@pytest.mark.usefixtures("world")
def test_another_process_gets_the_bits_of_every_push(record_property: Callable[[str, object], None]) -> None:
    """Three pushes, in buckets of one and of several tensors, arrive bit by bit; a lost engine leaves no memory."""
    generator = torch.Generator().manual_seed(1)
    shapes = [(1,), (3, 5), (1000, 333), (2048, 1024), (7,), (4096, 512)]
    tensors = {
        f"w{i}.{dtype}": torch.randn(shape, generator=generator).to("cuda", dtype)
        for i, shape in enumerate(shapes)
        for dtype in (torch.float32, torch.bfloat16)
    }
    engine = EngineProcess(tensors)
    try:
        allocated = torch.cuda.memory_allocated()
        for number in range(3):
            for tensor in tensors.values():
                tensor.copy_(torch.randn(tensor.shape, generator=generator).to(tensor.dtype))
            assert push(engine, tensors, 4 * MIB) == list(DeviceWeights(tensors).manifest())
            assert engine.bits() == {name: bits(tensor) for name, tensor in tensors.items()}, f"push {number}"
        engine.fails = True
        with pytest.raises(EngineLost):
            push(engine, tensors, 4 * MIB)
        torch.cuda.synchronize()
        record_property("bytes_left", torch.cuda.memory_allocated() - allocated)
        assert torch.cuda.memory_allocated() - allocated < MIB
    finally:
        engine.stop()


@pytest.mark.usefixtures("world")
def test_the_rate_of_a_push(record_property: Callable[[str, object], None]) -> None:
    """A push of 8 GiB copies each byte three times on the device: gather, buffer, parameter."""
    tensors = {f"w{i}": torch.randn(64, MIB // 2, device="cuda").bfloat16() for i in range(128)}  # 64 MiB each
    num_bytes = sum(t.numel() * t.element_size() for t in tensors.values())
    engine = EngineProcess(tensors)
    try:
        for bucket_mib in (128, 512):
            push(engine, tensors, bucket_mib * MIB)
            seconds = min(time_of(lambda size=bucket_mib: push(engine, tensors, size * MIB)) for _ in range(3))
            record_property(f"push_gb_per_s_{bucket_mib}_mib", round(num_bytes / seconds / 1e9, 1))
        target = torch.empty_like(tensors["w0"])
        copy_s = min(time_of(lambda: [target.copy_(tensor) for tensor in tensors.values()]) for _ in range(3))
        record_property("copy_gb_per_s", round(num_bytes / copy_s / 1e9, 1))
        record_property("share_of_the_limit", round(3 * copy_s / seconds, 3))
        if has_values():
            assert 3 * copy_s / seconds > 0.2, "a push waits for something other than copies"
            assert engine.bits()["w127"] == bits(tensors["w127"])
    finally:
        engine.stop()


def time_of(work: Callable[[], object]) -> float:
    torch.cuda.synchronize()
    start = time.perf_counter()
    work()
    torch.cuda.synchronize()
    return time.perf_counter() - start
