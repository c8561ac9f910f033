"""A health check whose answer nobody could read says nothing of the engine."""

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

TIMEOUT_S = 2.0


class Server:
    """Answers health checks in a thread of its own, once the loop of the test is held up, or never."""

    def __init__(self) -> None:
        self.num_checks, self.answers = 0, True
        self.held, self.over = threading.Event(), threading.Event()
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                outer.num_checks += 1
                (outer.held if outer.answers else outer.over).wait()
                self.send_response(200)
                self.send_header("Content-Length", "2")
                self.end_headers()
                self.wfile.write(b"{}")

            def log_message(self, format: str, *args: object) -> None:
                """Nothing on the console."""

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        self._thread = threading.Thread(target=self._server.serve_forever)
        self._thread.start()

    def close(self) -> None:
        self.held.set()
        self.over.set()
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()


class FakeSupervisor:
    """Supervisor of an engine that is never restarted."""

    def __init__(self, url: str) -> None:
        self.client = EngineClient(url, admin_key="", name="engine 0")

    async def restart(self) -> tuple[EngineClient, str]:
        raise AssertionError("restarted")

    async def stopped(self) -> tuple[int, ...]:
        return ()


@pytest.fixture
def server() -> Iterator[Server]:
    made = Server()
    yield made
    made.close()


def check(server: Server, *, held_s: float) -> tuple[bool, tuple[str, ...]]:
    """Block the loop once, from when the server has the check; return its result and the messages for the user."""

    async def scene() -> tuple[bool, tuple[str, ...]]:
        pool = EnginePool([FakeSupervisor(server.url)], HealthConfig(timeout_s=TIMEOUT_S), pushed=False)

        def hold() -> None:
            if server.num_checks == 0:  # nothing was asked yet
                asyncio.get_running_loop().call_later(0.01, hold)
                return
            server.held.set()
            time.sleep(held_s * scale())

        hold()
        try:
            return await pool.check_health(pool.slots[0], pool.slots[0].client, decodes=True), pool.news()
        finally:
            await pool.stop()

    return asyncio.run(scene())


def test_an_answer_that_could_not_be_read_in_time_is_asked_for_again(server: Server) -> None:
    found, (told,) = check(server, held_s=TIMEOUT_S + 1.5)
    assert found
    assert "was held up for" in told
    assert "belongs in asyncio.to_thread" in told


def test_an_engine_that_never_answers_is_excused_only_for_as_long_as_nothing_was_read(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On an idle machine its second check is the last; another may be held up again, which this test did not make."""
    ran: list[float] = []

    class Counted(EventLoopMonitor):
        @property
        def ran_s(self) -> float:
            ran.append(super().ran_s)
            return ran[-1]

    monkeypatch.setattr(engine_pool, "EventLoopMonitor", Counted)
    server.answers = False
    found, (told,) = check(server, held_s=TIMEOUT_S / 2)
    assert not found
    assert len(ran) >= 2 and server.num_checks >= 2
    assert sum(ran[:-1]) < TIMEOUT_S * scale() <= sum(ran)
    assert "is made again" in told


def test_a_loop_that_runs_has_nothing_to_tell(server: Server) -> None:
    assert check(server, held_s=0) == (True, ())
    assert server.num_checks == 1


def test_an_engine_that_never_answers_a_loop_that_runs_fails_its_first_check(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(event_loop, "MIN_BLOCKED_S", math.inf)  # but for a hold that this test did not make
    server.answers = False
    assert check(server, held_s=0) == (False, ())
    assert server.num_checks == 1


def test_an_engine_that_was_replaced_meanwhile_is_not_asked_again(server: Server) -> None:
    asked: list[bool] = []

    async def scene() -> bool:
        pool = EnginePool([FakeSupervisor(server.url)], HealthConfig(timeout_s=TIMEOUT_S), pushed=False)
        slot, engine = pool.slots[0], pool.slots[0].client

        async def replaced(seconds: float | None = None, *, decodes: bool = False) -> bool:
            asked.append(decodes)
            time.sleep(1)
            slot.down = True
            return False

        engine.health = replaced
        try:
            return await pool.check_health(slot, engine)
        finally:
            await pool.stop()

    assert asyncio.run(scene()) is False
    assert len(asked) == 1
