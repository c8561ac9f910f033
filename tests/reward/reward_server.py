"""A reward server: answers what it is told to, and remembers what it was asked."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from typing import Any

from aiohttp import web

Script = Callable[[dict[str, Any], int], tuple[int, str]]
"""(request, how many came before it) -> (HTTP status, body)."""


@asynccontextmanager
async def serve(script: Script, port: int = 0) -> AsyncGenerator[tuple[str, list[dict[str, Any]]]]:
    """Address of a server on loopback, and the requests it gets."""
    asked: list[dict[str, Any]] = []

    async def post(request: web.Request) -> web.Response:
        asked.append(await request.json())
        status, body = script(asked[-1], len(asked) - 1)
        return web.Response(status=status, text=body, content_type="application/json")

    app = web.Application()
    app.router.add_post("/score", post)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", port)
    await site.start()
    try:
        yield f"http://127.0.0.1:{runner.addresses[0][1]}/score", asked
    finally:
        await runner.cleanup()
