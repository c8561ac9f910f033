"""Fake reward server that answers by a script and records its requests."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from typing import Any

from aiohttp import web

Script = Callable[[dict[str, Any], int], tuple[int, str]]
"""(request, number of earlier requests) -> (HTTP status, body)."""


@asynccontextmanager
async def serve(script: Script, port: int = 0) -> AsyncGenerator[tuple[str, list[dict[str, Any]]]]:
    """Serve on loopback and yield the address and the list of received requests."""
    requests: list[dict[str, Any]] = []

    async def post(request: web.Request) -> web.Response:
        requests.append(await request.json())
        status, body = script(requests[-1], len(requests) - 1)
        return web.Response(status=status, text=body, content_type="application/json")

    app = web.Application()
    app.router.add_post("/score", post)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", port)
    await site.start()
    try:
        yield f"http://127.0.0.1:{runner.addresses[0][1]}/score", requests
    finally:
        await runner.cleanup()
