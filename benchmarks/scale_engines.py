"""Engines without models for ``benchmarks/scale.py``: HTTP servers that answer the requests of a push and of health checks."""

from __future__ import annotations

import asyncio
import contextlib
import resource
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from dataclasses import dataclass

from aiohttp import web

from slime_like.config.schema.faults import HealthConfig
from slime_like.rollout.engine.client import EngineClient
from slime_like.rollout.pool.engine_pool import EnginePool
from slime_like.rollout.pool.weight_update import EngineWeightUpdate

POSTS = (
    "/pause_generation",
    "/begin_weight_update",
    "/end_weight_update",
    "/update_weight_version",
    "/flush_cache",
    "/continue_generation",
)


class ControlEndpoints:
    """Control endpoints of one engine."""

    def __init__(self) -> None:
        self._version = "0"

    def app(self) -> web.Application:
        """Return the server's routes."""
        app = web.Application()
        app.add_routes([web.post(path, self._post) for path in POSTS])
        app.add_routes([web.get(path, self._get) for path in ("/health", "/health_generate", "/model_info")])
        return app

    async def _post(self, request: web.Request) -> web.Response:
        body = await request.json()
        self._version = body.get("new_version", self._version)
        return web.json_response({"success": True})

    async def _get(self, _: web.Request) -> web.Response:
        return web.json_response({"weight_version": self._version})


@dataclass(frozen=True, slots=True)
class SimulatedSupervisor:
    """Supervisor of an engine that never dies; implements ``EngineSupervisor``."""

    client: EngineClient

    async def restart(self) -> tuple[EngineClient, str]:
        """Return the same client and "simulated" as the cause: a simulated engine does not end."""
        return self.client, "simulated"

    async def stop_server(self) -> None:
        """Do nothing: a simulated engine does not end."""

    async def stopped_pids(self) -> tuple[int, ...]:
        """Return no process ids, because a simulated engine has no processes."""
        return ()


@dataclass(frozen=True, slots=True)
class EngineTimes:
    """Wall seconds of the three steps of a push and of a health check of all engines, and CPU seconds of the process."""

    num_engines: int
    begin: float
    commit: float
    resume: float
    health: float
    cpu: float  # CPU seconds of one push and one round of health checks


@contextlib.asynccontextmanager
async def serve(num_engines: int) -> AsyncGenerator[list[EngineClient]]:
    """Serve ``num_engines`` engines on loopback; yield a client of each."""
    runners: list[web.AppRunner] = []
    clients: list[EngineClient] = []
    try:
        for index in range(num_engines):
            runner = web.AppRunner(ControlEndpoints().app(), access_log=None)
            await runner.setup()
            runners.append(runner)
            await web.TCPSite(runner, "127.0.0.1", 0).start()
            host, port = runner.addresses[0][:2]
            clients.append(EngineClient(f"http://{host}:{port}", admin_key="", name=f"engine {index}"))
        yield clients
    finally:
        for client in clients:
            await client.close()
        for runner in runners:
            await runner.cleanup()


async def measure(num_engines: int, rounds: int) -> EngineTimes:
    """Return medians over ``rounds`` pushes, each followed by a health check of every engine.

    One more push at the beginning opens the connections and is not measured.
    """
    async with serve(num_engines) as clients:
        pool = EnginePool([SimulatedSupervisor(client) for client in clients], HealthConfig(), receives_pushes=True)
        update = EngineWeightUpdate(pool)
        rows: list[list[float]] = []
        for version in range(1, rounds + 2):
            cpu = cpu_seconds()
            begin = await seconds(update.begin)
            commit = await seconds(lambda v=version: update.commit(v))
            resume = await seconds(lambda v=version: update.resume(v))
            health = await seconds(lambda: _check_all(pool))
            rows.append([begin, commit, resume, health, cpu_seconds() - cpu])
        await pool.stop()
    return EngineTimes(num_engines, *(median(column) for column in zip(*rows[1:], strict=True)))


async def _check_all(pool: EnginePool) -> None:
    """Check all engines at the same time.

    Raises ``EngineLost`` if a connection fails, and ``AssertionError`` if an engine does not respond in time or reports an error.
    """
    results = await asyncio.gather(*(pool.check_health(slot, slot.client, decodes=True) for slot in pool.slots))
    assert all(results)


async def seconds(work: Callable[[], Awaitable[object]]) -> float:
    """Return the seconds that ``work`` takes."""
    start = time.perf_counter()
    await work()
    return time.perf_counter() - start


def cpu_seconds() -> float:
    """Return the CPU time of this process."""
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


def median(values: Sequence[float]) -> float:
    """Return the median; for an even number of values, the lower of the two in the middle."""
    return sorted(values)[(len(values) - 1) // 2]
