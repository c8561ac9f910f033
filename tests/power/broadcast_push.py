"""Push by ``broadcast`` to two engines, of which the first loses power: ``python -m tests.power.broadcast_push SENDER FIRST SECOND``.

Each argument is ``NETWORK=ADDRESS``: a network namespace, and the address in it. The engines are processes with an HTTP server, which
receive tensors as SGLang does, without a model.
"""

from __future__ import annotations

import asyncio
import os
import sys
import time
from collections.abc import Iterator
from datetime import timedelta
from itertools import batched
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from aiohttp import web
from torch.distributed import distributed_c10d as c10d

from slime_like.config.schema.guard_policy import GuardSpec
from slime_like.config.schema.resolved import TransportSpec
from slime_like.distributed.gloo_device import INTERFACE, share_gloo_device
from slime_like.distributed.wrapper import install
from slime_like.distributed.wrapper.watchdog import oldest_in_flight
from slime_like.errors import EngineLost
from slime_like.interfaces import Bucket, TensorMeta
from slime_like.rollout.engine.client import EngineClient
from slime_like.weight_sync.broadcast import BroadcastSender

PORT = 8000
PEER_TIMEOUT_S = 3.0
DEADLINE_S = 120.0
SIZE = 2**23  # elements of a tensor, more than the buffers of a connection hold
NUM_TENSORS = 4  # tensors of a bucket; gloo sends two of them at the same time
MANY = 10_000  # more buckets than are sent before the first engine is lost
TIMEOUT = timedelta(seconds=DEADLINE_S)
TRANSPORT = TransportSpec("broadcast", "gloo", 1, DEADLINE_S, PEER_TIMEOUT_S)


class Weights:
    """Weights of a sending rank: ``count`` buckets of zeros."""

    is_sender = True

    def __init__(self, count: int, size: int) -> None:
        self._count, self._zeros = count, torch.zeros(size)

    def manifest(self) -> tuple[TensorMeta, ...]:
        """Return an empty manifest, which the sender does not read."""
        return ()

    def buckets(self, max_bytes: int) -> Iterator[Bucket]:
        """Yield buckets of ``NUM_TENSORS`` tensors."""
        del max_bytes
        names = [f"w{i}" for i in range(self._count * NUM_TENSORS)]
        return (Bucket(tuple((name, self._zeros) for name in bucket)) for bucket in batched(names, NUM_TENSORS))


class ReceivingEngine:
    """Group and tensors of one engine."""

    def __init__(self) -> None:
        self._group: Any = None
        self._store: dist.Store | None = None

    def join(self, request: Any) -> None:
        """Join the sender's group."""
        world = request["world_size"]
        self._store = dist.TCPStore(
            request["master_address"], request["master_port"], world, False, TIMEOUT, wait_for_workers=False
        )
        store, name = dist.PrefixStore(request["group_name"], self._store), request["group_name"]
        helper: Any = c10d._new_process_group_helper  # pyright: ignore[reportPrivateUsage]
        self._group, _ = helper(world, request["rank_offset"], [], "gloo", store, name, timeout=TIMEOUT)
        ranks: Any = c10d._world.pg_group_ranks  # pyright: ignore[reportPrivateUsage]
        ranks[self._group] = {rank: rank for rank in range(world)}

    def receive(self, request: Any) -> None:
        """Receive the tensors of a bucket."""
        for name, shape in zip(request["names"], request["shapes"], strict=True):
            tensor = torch.ones(shape)
            dist.broadcast(tensor, group=self._group, group_src=0)
            if tensor.any():
                raise RuntimeError(f"{name} was not received")

    def leave(self, request: Any) -> None:
        """Leave the group."""
        del request
        dist.destroy_process_group(self._group)


async def serve(host: str, ready_fd: int) -> None:
    """Run the HTTP server of an engine. Write a byte to ``ready_fd``, and close it, once the server accepts connections."""
    engine, app = ReceivingEngine(), web.Application()

    def route(path: str, action: Any) -> None:
        async def handle(request: web.Request) -> web.Response:
            try:
                await asyncio.to_thread(action, await request.json())
            except RuntimeError as error:
                return web.json_response({"success": False, "message": str(error)}, status=400)
            return web.json_response({"success": True})

        app.router.add_post(path, handle)

    route("/init_weights_update_group", engine.join)
    route("/update_weights_from_distributed", engine.receive)
    route("/destroy_weights_update_group", engine.leave)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, host, PORT).start()
    os.write(ready_fd, b"1")
    os.close(ready_fd)  # so that the sender reads the end of the pipe, if the other engine ends before it writes
    await asyncio.Event().wait()


async def push(host: str, engines: list[str]) -> None:
    """Send to both engines until the first is lost, then to the second; print the time of each step."""
    clients = [
        EngineClient(
            f"http://{engine}:{PORT}", admin_key="", name=engine, deadline_s=DEADLINE_S, peer_timeout_s=PEER_TIMEOUT_S
        )
        for engine in engines
    ]
    sender = BroadcastSender(clients, transport=TRANSPORT, group_name="first", host=host)
    await sender.send(Weights(1, 10))
    weights = Weights(MANY, SIZE)
    report("sending")
    start = time.monotonic()
    try:
        await sender.send(weights)
    except EngineLost as error:
        report(f"lost after {time.monotonic() - start:.1f} s: {error}")
    start = time.monotonic()
    await sender.close()
    report(f"closed after {time.monotonic() - start:.1f} s")
    wrapper = install.current()
    assert wrapper is not None
    report(f"oldest op in flight: {oldest_in_flight(wrapper)}")
    sender = BroadcastSender(clients[1:], transport=TRANSPORT, group_name="second", host=host)
    tensors = await sender.send(Weights(2, 10))
    await sender.close()
    report(f"sent {len(tensors)} tensors to the other engine")


def report(text: str) -> None:
    """Print a line for the test."""
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


def main() -> None:
    """Fork the engines, each in its network, and push from the network of the sender."""
    sender, *engines = (argument.split("=") for argument in sys.argv[1:])
    read_end, ready_fd = os.pipe()
    for name, address in engines:
        if os.fork() == 0:
            os.close(read_end)
            os.dup2(2, 1)  # the test reads the output of the sender, up to its end
            enter(name)
            asyncio.run(serve(address, ready_fd))
    os.close(ready_fd)
    for _ in engines:
        assert os.read(read_end, 1), "an engine ended before it accepted connections"
    os.close(read_end)
    enter(sender[0])
    share_gloo_device()
    install.install(GuardSpec(wrap=True), torch.device("cpu"), 0)
    asyncio.run(push(sender[1], [address for _, address in engines]))
    report("end")
    os._exit(0)


def enter(name: str) -> None:
    """Enter a network namespace."""
    os.environ[INTERFACE] = "eth0"
    with (Path("/var/run/netns") / name).open() as file:
        os.setns(file.fileno(), os.CLONE_NEWNET)


if __name__ == "__main__":
    main()
