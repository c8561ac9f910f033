"""Observations of a process on two phantom GPUs of 8 GiB."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import gc
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from slime_like.config.schema.resolved import TransportSpec
from slime_like.errors import EngineLost, WeightSyncError
from slime_like.phantom import counters
from slime_like.phantom.store import join_world
from slime_like.util import cuda_ipc
from slime_like.weight_sync.device_memory import CudaHandles
from slime_like.weight_sync.ipc import IpcSender
from slime_like.weight_sync.shared import pin, unpin
from slime_like.weight_sync.tensor import TensorSender
from tests.train.ranks import RankWorld
from tests.weight_sync.ipc_doubles import DeviceEngine, StageWeights
from tests.weight_sync.tensor_doubles import RankWeights, Receiver

GIB = 2**30


def observe(world: RankWorld) -> dict[str, Any]:
    """Return the result of each function below, by its name."""
    del world
    functions = (
        devices,
        memory,
        calls,
        copies,
        streams,
        graphs,
        launch_checks,
        attention,
        host_memory,
        large_host_tensors,
        shared_memory,
        virtual_memory,
        solo_world,
    )
    return {function.__name__: function() for function in functions}


def devices() -> dict[str, Any]:
    torch.cuda.set_device(1)
    current = torch.cuda.current_device(), torch.zeros(1, device="cuda").device.index
    torch.cuda.set_device(0)
    properties = [torch.cuda.get_device_properties(d) for d in range(torch.cuda.device_count())]
    return {
        "phantom": counters.is_phantom(),
        "names": [p.name for p in properties],
        "memory": [p.total_memory for p in properties],
        "capability": torch.cuda.get_device_capability(),
        "current": current,
    }


def memory() -> dict[str, Any]:
    free, total = torch.cuda.mem_get_info()
    counters.reset_peak()
    block = torch.empty(3 * GIB, dtype=torch.uint8, device="cuda")
    block_on_second = torch.empty(GIB, dtype=torch.uint8, device="cuda:1")
    out: dict[str, Any] = {
        "context": total - free,
        "allocated": torch.cuda.memory_allocated(),
        "driver": [counters.used_bytes(d) for d in (0, 1)],
        "free": torch.cuda.mem_get_info()[0],
    }
    try:
        torch.empty(6 * GIB, dtype=torch.uint8, device="cuda")
    except torch.OutOfMemoryError as error:
        out["too large"] = str(error)
    del block, block_on_second
    out["cached"] = torch.cuda.memory_allocated(), torch.cuda.memory_reserved()
    torch.cuda.empty_cache()
    out["emptied"] = counters.used_bytes(), counters.peak_bytes()
    pinned = torch.empty(GIB, dtype=torch.uint8, pin_memory=True)
    out["pinned"] = pinned.is_pinned(), counters.pinned_bytes()
    out["twice freed"] = ctypes.CDLL(None).cudaFree(ctypes.c_void_p(12345))
    ctypes.CDLL(None).cudaGetLastError()
    return out


def calls() -> dict[str, Any]:
    out: dict[str, Any] = {}
    a = torch.zeros(64, 64, device="cuda")
    functions: dict[str, Any] = {
        "add": lambda: a + a,
        "product": lambda: a @ a,
        "read": lambda: a.sum().item(),
        "wait": torch.cuda.synchronize,
    }
    for name, function in functions.items():
        before = counters.read_counts()
        function()
        out[name] = counters.read_counts() - before
    torch.cuda.set_sync_debug_mode("error")
    try:
        a.sum().item()
    except RuntimeError as error:
        out["sync refused"] = str(error)
    torch.cuda.set_sync_debug_mode(0)
    return {name: value if isinstance(value, str) else _plain(value) for name, value in out.items()}


def _plain(value: counters.CallCounts) -> dict[str, int]:
    return {name: getattr(value, name) for name in ("launches", "products", "copies_to_host", "syncs")}


def copies() -> dict[str, Any]:
    numbers = torch.tensor([3, 1, 2])
    column = torch.arange(12.0).view(3, 4)[:, 1]
    return {
        "round trip": numbers.cuda().cpu().tolist(),
        "strided": column.cuda().cpu().tolist(),
        "between devices": numbers.to("cuda:0").to("cuda:1").cpu().tolist(),
        "count": torch.tensor(7).cuda().item(),  # a small integer that a copy has put there
        "computed": torch.rand(10, device="cuda").sum().item(),
    }


def streams() -> dict[str, Any]:
    stream, start, end = torch.cuda.Stream(), torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    with torch.cuda.stream(stream):
        x = torch.ones(8, device="cuda")
        end.record(stream)
    torch.cuda.current_stream().wait_stream(stream)
    end.synchronize()
    return {
        "done": end.query(),
        "ms": start.elapsed_time(end),
        "differ": stream != torch.cuda.current_stream(),
        "n": len(x),
    }


def graphs() -> dict[str, Any]:
    x, graph, before = torch.ones(8, device="cuda"), torch.cuda.CUDAGraph(), counters.read_counts()
    with torch.cuda.graph(graph):
        y = x + 1
        captured = torch.cuda.is_current_stream_capturing()
    graph.replay()
    return {"captured": captured, "graphs": (counters.read_counts() - before).graphs, "shape": list(y.shape)}


def launch_checks() -> dict[str, int]:
    launch = ctypes.CDLL(None).cuLaunchKernel
    sizes = {"fits": (1, 1, 1, 256, 1, 1), "no block": (0, 1, 1, 256, 1, 1), "threads": (1, 1, 1, 1025, 1, 1)}
    sizes["rows"] = (1, 65536, 1, 32, 1, 1)
    results = {name: launch(None, *size, 0, None, None, None) for name, size in sizes.items()}
    ctypes.CDLL(None).cudaGetLastError()
    return results


def attention() -> dict[str, Any]:
    from torch.nn.attention.varlen import varlen_attn

    out: dict[str, Any] = {}
    for name, dtype, width, bounds_dtype in (
        ("accepted", torch.bfloat16, 128, torch.int32),
        ("data type", torch.float32, 128, torch.int32),
        ("head dimension", torch.bfloat16, 512, torch.int32),
        ("type of bounds", torch.bfloat16, 128, torch.int64),
    ):
        bounds = torch.tensor([0, 400, 1000], dtype=bounds_dtype, device="cuda")
        q, k = (torch.empty(1000, h, width, device="cuda", dtype=dtype, requires_grad=True) for h in (8, 2))
        try:
            result: Any = varlen_attn(q, k, k, bounds, bounds, 600, 600, window_size=(-1, 0), enable_gqa=True)
            result.sum().backward()
            out[name] = list(result.shape), None if k.grad is None else list(k.grad.shape)
        except RuntimeError as error:
            out[name] = str(error)
    return out


def host_memory() -> dict[str, Any]:
    """Push two buckets through host memory to engines on this and another machine; return comparisons and counts."""
    numbers = {f"w{i}": torch.arange(1000.0 * i, 1000.0 * (i + 1)) for i in range(6)}
    source = RankWeights({name: tensor.cuda() for name, tensor in numbers.items()})
    local, remote = Receiver("here"), Receiver("elsewhere")
    pinned = counters.pinned_bytes()
    transport = TransportSpec("tensor", "nccl", 3 * 4000, 10.0)
    engines: Any = [local, remote]
    sender = TensorSender(engines, transport=transport, group_name="", host="here")
    before = counters.read_counts()
    metas = asyncio.run(sender.send(source))
    calls = counters.read_counts() - before
    grown = counters.pinned_bytes() - pinned
    asyncio.run(sender.close())
    return {
        "equal": [all(torch.equal(e.tensors[name], tensor) for name, tensor in numbers.items()) for e in engines],
        "reported": [meta.name for meta in metas],
        "copies": (calls.copies_to_host, calls.pageable_copies, calls.syncs),
        "buckets": len(local.shared),
        "pinned": (grown, counters.pinned_bytes() - pinned),
        "pageable": pageable_copies(source),
        "refused": refused_lock(),
    }


def pageable_copies(source: RankWeights) -> int:
    """Copy all weights to pageable memory with ``cpu()``; return the number of such copies by the counter."""
    before = counters.read_counts()
    for bucket in source.buckets(1 << 20):
        for _, tensor in bucket.tensors:
            tensor.cpu()
    return (counters.read_counts() - before).pageable_copies


def refused_lock() -> str:
    """Lock the same memory twice; return the error, or "" without one. A later kernel must not raise it again."""
    memory = torch.empty(1 << 20, dtype=torch.uint8)
    pin(memory)
    try:
        pin(memory)
    except WeightSyncError as error:
        return str(error)
    finally:
        torch.ones(1, device="cuda").add_(1)
        unpin(memory)
    return ""


def large_host_tensors() -> dict[str, Any]:
    """Write to 8 GiB of host tensors above the phantom GPU's limit; return the counted bytes and the memory used."""
    torch.accelerator.empty_host_cache()
    before, counted = _private_bytes(), (counters.pageable_bytes(), counters.pinned_bytes())
    limited = torch.full((64 * 2**20,), 7, dtype=torch.uint8)
    tensors = [torch.empty(4 * GIB, dtype=torch.uint8, pin_memory=pinned).fill_(9) for pinned in (False, True)]
    out: dict[str, Any] = {
        "counted": (counters.pageable_bytes() - counted[0], counters.pinned_bytes() - counted[1]),
        "private": _private_bytes() - before,
        "pages": _file_bytes("phantom host memory"),
        "of the limit": [limited.numel(), int(limited.max())],
    }
    tensors.clear()
    torch.accelerator.empty_host_cache()
    out["freed"] = counters.pageable_bytes() - counted[0], counters.pinned_bytes() - counted[1]
    return out


def _file_bytes(name: str) -> int:
    """Return the memory of this process's unnamed files with ``name``."""
    total = 0
    for file in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # the descriptor of the folder itself
            total += file.stat().st_blocks * 512 if name in str(file.readlink()) else 0
    return total


def _private_bytes() -> int:
    """Return the resident memory of this process that is not of a file."""
    (line,) = [line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("RssAnon")]
    return int(line.split()[1]) * 1024


def shared_memory() -> dict[str, Any]:
    """Push buckets by CUDA IPC to an engine, and to one that is lost; return comparisons, calls and leaked bytes."""
    join_world(0, 1)
    numbers = {f"w{i}": torch.arange(1000.0 * i, 1000.0 * (i + 1)) for i in range(5)}
    source = StageWeights([{name: tensor.cuda() for name, tensor in numbers.items()}])
    before, allocated = counters.read_counts(), torch.cuda.memory_allocated()
    engine: Any = DeviceEngine((0,), CudaHandles())
    transport = TransportSpec("ipc", "nccl", 8192, 10.0)
    sender = IpcSender([engine], transport=transport, group_name="", host="")
    metas = asyncio.run(sender.send(source))
    lost_engine: Any = DeviceEngine((0,), CudaHandles(), fails_at=2, error=EngineLost("lost"))
    with contextlib.suppress(EngineLost):
        asyncio.run(IpcSender([lost_engine], transport=transport, group_name="", host="").send(source))
    del lost_engine  # the traceback of its error refers to tensors
    gc.collect()
    leaked_bytes = torch.cuda.memory_allocated() - allocated - sum(4096 for _ in numbers)
    dist.destroy_process_group()
    calls = counters.read_counts() - before
    try:
        CudaHandles().open(cuda_ipc.share(torch.empty(8, device="cuda")) | {"handle": bytes(64).hex()})
    except RuntimeError as error:
        refusal = str(error).splitlines()[0]
    else:
        refusal = ""
    ctypes.CDLL(None).cudaGetLastError()
    return {
        "equal": {name: torch.equal(engine.ranks[0][name].cpu(), tensor) for name, tensor in numbers.items()},
        "reported": [meta.name for meta in metas],
        "requests": engine.num_requests,
        "calls": (calls.shares, calls.openings, calls.closings),
        "kept": leaked_bytes,
        "refused": refusal,
    }


def virtual_memory() -> dict[str, Any]:
    """Map memory to reserved addresses, unmap it and map other memory. The calls' results are 0 unless they are refused."""
    cuda, size, none = ctypes.CDLL(None), ctypes.c_size_t(1 << 30), ctypes.c_size_t(0)
    flags = ctypes.c_uint64(0)
    address, memory = ctypes.c_void_p(), ctypes.c_void_p()
    properties = (ctypes.c_int * 16)(1, 0, 1, 1)  # of memory on GPU 1
    used = [counters.used_bytes(1)]
    results = [cuda.cuMemAddressReserve(ctypes.byref(address), size, none, None, flags)]
    for number in (b"\x01", b"\x02"):
        results.append(cuda.cuMemCreate(ctypes.byref(memory), size, properties, flags))
        results.append(cuda.cuMemMap(address, size, none, memory, flags))
        results.append(cuda.cuMemRelease(memory))  # the mapping keeps it
        used.append(counters.used_bytes(1))
        assert address.value is not None
        assert ctypes.string_at(address.value, 1) == b"\0"
        ctypes.memmove(address.value, number, 1)
        results.append(cuda.cuMemUnmap(address, size))
        used.append(counters.used_bytes(1))
    refused = [
        cuda.cuMemUnmap(address, size),
        cuda.cuMemCreate(ctypes.byref(memory), ctypes.c_size_t(1 << 40), properties, flags),
    ]
    results.append(cuda.cuMemAddressFree(address, size))
    return {"results": results, "used": [n - used[0] for n in used], "refused": refused}


def solo_world() -> dict[str, Any]:
    """Return the results of collectives on rank 5 of a world of 8, whose other ranks do not exist."""
    join_world(5, 8)
    group, before = dist.new_group([4, 5]), counters.read_counts()
    x, parts = torch.tensor([1, 2], device="cuda"), torch.empty(8, 2, dtype=torch.int64, device="cuda")
    assert isinstance(group, dist.ProcessGroup)
    dist.all_reduce(x, group=group)
    dist.all_gather_single(parts, x)
    objects: list[Any] = [None] * 8
    dist.all_gather_object(objects, {"rank": dist.get_rank()})
    dist.barrier()
    count = (counters.read_counts() - before).collectives
    dist.destroy_process_group()
    return {"parts": parts.cpu().tolist(), "objects": objects, "collectives": count}
