"""Replies of a job server that are valid JSON of another form end in one message."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from aiohttp import test_utils, web

from slime_like.cluster.jobs.address import ServerAddress
from slime_like.cluster.jobs.server import JobServer
from slime_like.errors import WorkerError

NODE = {"state": "ALIVE", "node_ip": "10.0.0.1", "node_id": "a", "resources_total": {"CPU": 1}}


@pytest.mark.parametrize("reply", [[], ["x"], 3, "text", None])
@pytest.mark.parametrize(
    "ask",
    [
        lambda server: server.requires_token(),
        lambda server: server.output("a"),
        lambda server: server.nodes(),
        lambda server: server.job("a"),
    ],
    ids=["requires_token", "output", "nodes", "job"],
)
def test_a_reply_that_is_no_object_is_reported(reply: Any, ask: Callable[[JobServer], Awaitable[object]]) -> None:
    assert_reported(reply, ask)


@pytest.mark.parametrize("reply", [{"jobs": []}, ["x"], 3, None])
def test_a_list_of_jobs_that_is_no_list_is_reported(reply: Any) -> None:
    assert_reported(reply, lambda server: server.jobs())


@pytest.mark.parametrize(
    "nodes", [3, [3], [NODE | {"resources_total": "many"}], [NODE | {"resources_total": {"CPU": "many"}}]]
)
def test_malformed_nodes_are_reported(nodes: Any) -> None:
    assert_reported({"data": {"result": {"result": nodes}}}, lambda server: server.nodes())


def assert_reported(reply: Any, ask: Callable[[JobServer], Awaitable[object]]) -> None:
    """Assert that ``ask`` raises ``WorkerError`` if the server answers each request with the JSON value ``reply``."""

    async def answer(_: web.Request) -> web.Response:
        return web.json_response(reply)

    async def run() -> None:
        app = web.Application()
        app.add_routes([web.get("/{path:.*}", answer)])
        async with (
            test_utils.TestServer(app) as server,
            JobServer(ServerAddress(f"http://{server.host}:{server.port}")) as client,
        ):
            await ask(client)

    with pytest.raises(WorkerError, match="cannot be read"):
        asyncio.run(run())
