"""Event loop monitor: a health check that this blocked process could not read does not count against the engine."""

from __future__ import annotations

import asyncio
import math
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from slime_like.config.schema.faults import HealthConfig
from slime_like.rollout.engine.client import EngineClient
from slime_like.rollout.pool import engine_pool, event_loop
from slime_like.rollout.pool.engine_pool import EnginePool
from slime_like.rollout.pool.event_loop import EventLoopMonitor
from slime_like.util.deadline import scale

TIMEOUT_S = 1.0


class LateServer:
    """HTTP server in a thread that answers health checks once the test blocks its event loop, or never."""

    def __init__(self) -> None:
        self.num_checks, self.answers = 0, True
        self.loop_blocked, self.closing = threading.Event(), threading.Event()
        outer = self

        class HealthHandler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                outer.num_checks += 1
                (outer.loop_blocked if outer.answers else outer.closing).wait()
                self.send_response(200)
                self.send_header("Content-Length", "2")
                self.end_headers()
                self.wfile.write(b"{}")

            def log_message(self, format: str, *args: object) -> None:
                """Log nothing."""

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), HealthHandler)
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        self._thread = threading.Thread(target=self._server.serve_forever)
        self._thread.start()

    def close(self) -> None:
        self.loop_blocked.set()
        self.closing.set()
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()


class IdleSupervisor:
    """Supervisor of an engine that is never restarted."""

    def __init__(self, url: str) -> None:
        self.client = EngineClient(url, admin_key="", name="engine 0")

    async def restart(self) -> tuple[EngineClient, str]:
        raise AssertionError("restarted")

    async def stop_server(self) -> None:
        raise AssertionError("stopped")

    async def stopped_pids(self) -> tuple[int, ...]:
        return ()


@pytest.fixture
def server() -> Iterator[LateServer]:
    http_server = LateServer()
    yield http_server
    http_server.close()


def check(server: LateServer, *, blocked_s: float) -> tuple[bool, tuple[str, ...]]:
    """Block the loop once after the server received the check; return the check's result and the user messages."""

    async def scene() -> tuple[bool, tuple[str, ...]]:
        pool = EnginePool([IdleSupervisor(server.url)], HealthConfig(timeout_s=TIMEOUT_S), receives_pushes=False)

        def hold() -> None:
            if server.num_checks == 0:  # no check was received yet
                asyncio.get_running_loop().call_later(0.01, hold)
                return
            server.loop_blocked.set()
            time.sleep(blocked_s * scale())

        hold()
        try:
            return await pool.check_health(pool.slots[0], pool.slots[0].client, decodes=True), pool.drain_messages()
        finally:
            await pool.stop()

    return asyncio.run(scene())


def test_a_check_that_could_not_be_read_in_time_is_repeated(server: LateServer) -> None:
    healthy, (message,) = check(server, blocked_s=TIMEOUT_S + 0.5)
    assert healthy
    assert "was blocked for" in message
    assert "in asyncio.to_thread" in message


def test_blocked_time_is_excluded_from_the_timeout(server: LateServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """On an idle machine the second check is the last; on a busy one the loop may be blocked again by other load."""
    run_times: list[float] = []

    class Counted(EventLoopMonitor):
        @property
        def ran_s(self) -> float:
            run_times.append(super().ran_s)
            return run_times[-1]

    monkeypatch.setattr(engine_pool, "EventLoopMonitor", Counted)
    server.answers = False
    healthy, (message,) = check(server, blocked_s=0.8 * TIMEOUT_S)
    assert not healthy
    assert len(run_times) >= 2 and server.num_checks >= 2
    assert sum(run_times[:-1]) < TIMEOUT_S * scale() <= sum(run_times)
    assert "is repeated" in message


def test_a_running_loop_gives_no_message(server: LateServer) -> None:
    assert check(server, blocked_s=0) == (True, ())
    assert server.num_checks == 1


def test_an_unanswered_check_fails_if_the_loop_was_running(server: LateServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(event_loop, "MIN_BLOCKED_S", math.inf)  # ignore blocking that this test did not cause
    server.answers = False
    assert check(server, blocked_s=0) == (False, ())
    assert server.num_checks == 1


def test_a_replaced_engine_is_not_checked_again(server: LateServer) -> None:
    decode_flags: list[bool] = []

    async def scene() -> bool:
        pool = EnginePool([IdleSupervisor(server.url)], HealthConfig(timeout_s=TIMEOUT_S), receives_pushes=False)
        slot, engine = pool.slots[0], pool.slots[0].client

        async def replaced(seconds: float | None = None, *, decodes: bool = False) -> bool:
            decode_flags.append(decodes)
            time.sleep(0.7)  # longer than event_loop.MIN_BLOCKED_S
            slot.is_restarting = True
            return False

        engine.health = replaced
        try:
            return await pool.check_health(slot, engine)
        finally:
            await pool.stop()

    assert asyncio.run(scene()) is False
    assert len(decode_flags) == 1
