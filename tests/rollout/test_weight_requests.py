"""Requests of a weight push select the served model, so a draft model for speculative decoding keeps its weights."""

from __future__ import annotations

import asyncio
from typing import Any

from aiohttp import web

from slime_like.interfaces import TensorMeta
from slime_like.rollout.engine.client import EngineClient

SELECTING = ("/begin_weight_update", "/update_weights_from_tensor", "/update_weights_from_distributed")
"""Requests that SGLang applies to every model of an engine by default. ``end_weight_update`` needs no selector."""


def test_a_push_selects_the_served_model_only() -> None:
    bodies: list[tuple[str, Any]] = []

    async def record(request: web.Request) -> web.Response:
        bodies.append((request.path, await request.json()))
        return web.json_response({"success": True})

    async def push() -> None:
        app = web.Application()
        app.router.add_post("/{path}", record)
        runner = web.AppRunner(app)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        host, port = runner.addresses[0]
        client = EngineClient(f"http://{host}:{port}", admin_key="", deadline_s=60)
        await client.begin_update()
        await client.update_from_tensors(b"tensors")
        await client.update_from_broadcast([TensorMeta("lm_head.weight", (3, 2), "float32")], "group")
        await client.end_update(1)
        await client.close()
        await runner.cleanup()

    asyncio.run(push())
    assert [path for path, _ in bodies] == [*SELECTING, "/end_weight_update", "/update_weight_version"]
    assert [body.get("selector") for _, body in bodies] == ["target"] * len(SELECTING) + [None, None]
