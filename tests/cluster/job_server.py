"""Job server in the test's process: the routes of Ray's job API that the client uses, with configurable faults."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web

from slime_like.cluster.jobs.address import ServerAddress
from slime_like.cluster.jobs.job import CODE, FORMAT, MARK, PYTHON, RUN_DIR, RUN_NAME, USER
from slime_like.cluster.jobs.server import JobServer

TOKEN = "a token"
OWN = {MARK: FORMAT, RUN_NAME: "a", RUN_DIR: "/runs/a", CODE: "/code", PYTHON: "/code/.venv/bin/python", USER: "me"}


@dataclass(slots=True)
class ServerState:
    """Jobs of the server, their logs, and the requests that it received."""

    jobs: dict[str, dict[str, Any]] = field(default_factory=dict[str, dict[str, Any]])
    logs: dict[str, str] = field(default_factory=dict[str, str])
    nodes: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])
    submitted: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])
    stopped: list[str] = field(default_factory=list[str])
    removed: list[str] = field(default_factory=list[str])
    packages: dict[str, bytes] = field(default_factory=dict[str, bytes])
    mode: str = "token"
    breaks: list[int] = field(default_factory=list[int])  # characters after which the next connections to a log break
    ends_at_break: bool = False  # a job fails when the connection to its log breaks
    helper_ends_run: bool = True  # a submitted job exits with 0 at once and running jobs with 130; else it exits with 2

    def add(self, job_id: str, status: str, code: int | None = None, metadata: dict[str, str] | None = None) -> None:
        """Add a job or change its state."""
        self.jobs[job_id] = {
            "submission_id": job_id,
            "status": status,
            "driver_exit_code": code,
            "message": f"{status} for a reason\nand a log",
            "start_time": 1_700_000_000_000 + len(self.jobs),
            "end_time": None,
            "metadata": OWN if metadata is None else metadata,
        }


@asynccontextmanager
async def job_server(state: ServerState, token: str | None = TOKEN) -> AsyncGenerator[JobServer]:
    """Serve ``state`` on loopback; yield a client with ``token``."""
    app = web.Application(middlewares=[_authorise])
    routes = _Routes(state)
    app.add_routes(
        [
            web.get("/api/version", routes.version),
            web.get("/api/authentication_mode", routes.mode),
            web.get("/api/v0/nodes", routes.nodes),
            web.get("/api/packages/gcs/{name}", routes.has_package),
            web.put("/api/packages/gcs/{name}", routes.put_package),
            web.post("/api/jobs/", routes.submit),
            web.get("/api/jobs/", routes.jobs),
            web.get("/api/jobs/{id}", routes.job),
            web.delete("/api/jobs/{id}", routes.remove),
            web.post("/api/jobs/{id}/stop", routes.stop),
            web.get("/api/jobs/{id}/logs", routes.output),
            web.get("/api/jobs/{id}/logs/tail", routes.tail),
        ]
    )
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0, shutdown_timeout=1)
    await site.start()
    host, port = runner.addresses[0][:2]
    try:
        async with JobServer(ServerAddress(f"http://{host}:{port}", token)) as client:
            yield client
    finally:
        await runner.cleanup()


@web.middleware
async def _authorise(request: web.Request, handler: Any) -> web.StreamResponse:
    if request.path.endswith(("version", "mode")) or request.headers.get("Authorization") == f"Bearer {TOKEN}":
        return await handler(request)
    return web.Response(status=401, text="Unauthorized")


class _Routes:
    def __init__(self, state: ServerState) -> None:
        self._state = state

    async def version(self, _: web.Request) -> web.Response:
        return web.json_response({"ray_version": "2.60.0"})

    async def mode(self, _: web.Request) -> web.Response:
        return web.json_response({"authentication_mode": self._state.mode})

    async def nodes(self, _: web.Request) -> web.Response:
        return web.json_response({"data": {"result": {"result": self._state.nodes}}})

    async def has_package(self, request: web.Request) -> web.Response:
        return web.Response(status=200 if request.match_info["name"] in self._state.packages else 404)

    async def put_package(self, request: web.Request) -> web.Response:
        self._state.packages[request.match_info["name"]] = await request.read()
        return web.Response()

    async def submit(self, request: web.Request) -> web.Response:
        body = await request.json()
        self._state.submitted.append(body)
        self._state.add(body["submission_id"], "SUCCEEDED", 0 if self._state.helper_ends_run else 2, body["metadata"])
        self._state.logs[body["submission_id"]] = "DataError: no run is active here\n"
        for job in self._state.jobs.values():
            if job["status"] == "RUNNING" and self._state.helper_ends_run:
                job.update(status="FAILED", driver_exit_code=130)
        return web.json_response({})

    async def jobs(self, _: web.Request) -> web.Response:
        return web.json_response([{"submission_id": None, "status": "RUNNING"}, *self._state.jobs.values()])

    async def job(self, request: web.Request) -> web.Response:
        job = self._state.jobs.get(request.match_info["id"])
        return web.Response(status=404, text="no job") if job is None else web.json_response(job)

    async def remove(self, request: web.Request) -> web.Response:
        self._state.removed.append(request.match_info["id"])
        return web.json_response({})

    async def stop(self, request: web.Request) -> web.Response:
        self._state.stopped.append(request.match_info["id"])
        self._state.add(request.match_info["id"], "STOPPED")
        return web.json_response({"stopped": True})

    async def output(self, request: web.Request) -> web.Response:
        return web.json_response({"logs": self._state.logs[request.match_info["id"]]})

    async def tail(self, request: web.Request) -> web.StreamResponse:
        """Send the log in pieces; break the connection where ``breaks`` says, else end it and a running job."""
        socket = web.WebSocketResponse()
        await socket.prepare(request)
        job_id = request.match_info["id"]
        end = self._state.breaks.pop(0) if self._state.breaks else None
        text = self._state.logs[job_id][:end]
        for i in range(0, len(text), 7):
            await socket.send_str(text[i : i + 7])
        if end is None:
            if self._state.jobs[job_id]["status"] == "RUNNING":
                self._state.add(job_id, "SUCCEEDED", 0)
            await socket.close()
            return socket
        if self._state.ends_at_break:
            self._state.add(job_id, "FAILED", 1)
        if request.transport is not None:
            request.transport.abort()
        return socket
