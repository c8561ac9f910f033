"""Server of an engine on a phantom GPU, as a run starts it. This process is a trainer's rank on the same GPU."""

from __future__ import annotations

import asyncio
import os
import struct
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file

from slime_like.config.schema.residency import CUDA_GRAPH, ENGINE_PARTS, KV_CACHE
from slime_like.config.schema.resolved import EngineSpec, TransportSpec
from slime_like.interfaces import EngineAddress, Sampling, WeightSender
from slime_like.phantom.store import join_world
from slime_like.rollout.engine.client import EngineClient
from slime_like.rollout.engine.server import EngineServer
from slime_like.weight_sync.broadcast import BroadcastSender
from slime_like.weight_sync.ipc import IpcSender
from slime_like.weight_sync.tensor import TensorSender
from tests.train.ranks import RankWorld
from tests.weight_sync.ipc_doubles import StageWeights
from tests.weight_sync.tensor_doubles import RankWeights

KEY, HOST = "a key of this test", "127.0.0.1"
SECONDS = 240
PROMPT = np.arange(8, dtype=np.int32)
SENDERS: dict[str, Any] = {"tensor": TensorSender, "ipc": IpcSender, "broadcast": BroadcastSender}


def run(world: RankWorld, model: Path, changes: Mapping[str, Any], first_free_gib: float) -> dict[str, Any]:
    """Start an engine; generate, push by each transport, release and restore its memory. Return observations of each step.

    ``first_free_gib``: free memory at an assumed earlier start, before a trainer took some of it.
    """
    del world
    spec = EngineSpec(str(model), "cuda", "bfloat16", 1, 512, 0, str(model.parent / "engine.log"), SECONDS, 8)
    server = EngineServer(replace(spec, **changes), admin_key=KEY, first_free_gib=first_free_gib)
    server.start()
    try:
        server.wait_ready()
        return asyncio.run(_steps(server, load_file(model / "model.safetensors", device="cuda")))
    finally:
        server.stop()


async def _steps(server: EngineServer, tensors: dict[str, torch.Tensor]) -> dict[str, Any]:
    client = EngineClient.at(EngineAddress("engine 0", server.url, KEY, 1, gpus=(0,)), deadline_s=60)
    info = await client._connection.request("info", "GET", "/server_info", None)
    out: dict[str, Any] = {
        "memory": info["internal_states"][0]["memory_usage"],
        "free": server.free_before_load(),
        "lengths": [await _generate(client)],
        "log": Path(server._spec.log_path).read_text(errors="replace"),
    }
    join_world(0, 1)
    senders: dict[str, WeightSender] = {
        kind: SENDERS[kind](
            [client], transport=TransportSpec(kind, "nccl", 1 << 18, 60), group_name="weights", host=HOST
        )
        for kind in SENDERS
    }
    for version, (kind, sender) in enumerate(senders.items(), 1):
        out[kind] = await _push(client, sender, tensors, version)
        out["lengths"].append(await _generate(client))
    out["used"] = [_used()]
    for parts in ((KV_CACHE, CUDA_GRAPH), ENGINE_PARTS):
        await client.pause()
        await client.release_memory(parts)
        out["used"].append(_used())
        await client.restore_memory(parts)
        out["used"].append(_used())
        if parts != ENGINE_PARTS:
            await client.resume()
    out["last push"] = await _push(client, senders["tensor"], tensors, len(senders) + 1)
    out["lengths"].append(await _generate(client))
    for sender in senders.values():
        await sender.close()
    return out


async def _push(
    client: EngineClient, sender: WeightSender, tensors: dict[str, torch.Tensor], version: int
) -> dict[str, Any]:
    """Push all weights; return the number of tensors, and the version that the engine serves."""
    source: Any = StageWeights([tensors]) if isinstance(sender, IpcSender) else RankWeights(tensors)
    await client.pause()
    await client.begin_update()
    metas = await sender.send(source)
    await client.end_update(version)
    await client.flush()
    await client.resume()
    return {"tensors": len(metas), "version": await client.version()}


async def _generate(client: EngineClient) -> tuple[int, ...]:
    """Return the lengths of two completions and of a score."""
    completions = await client.generate(PROMPT, [0, 1], Sampling(temperature=1.0, max_new_tokens=3))
    (scores,) = await client.score([PROMPT], 1.0)
    return (*(len(completion.token_ids) for completion in completions), len(scores))


def _used() -> int:
    """Return the bytes that the engine's processes have on GPU 0."""
    files = [file for file in Path(os.environ["PHANTOM_GPU_USE"]).iterdir() if file.name != str(os.getpid())]
    return sum(struct.unpack_from("q", file.read_bytes())[0] for file in files)
