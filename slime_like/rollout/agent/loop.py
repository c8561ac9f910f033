"""Event loop for agents, in its own thread: a blocking agent delays other agents, but not the manager."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from typing import Any

JOIN_S = 5.0
MIN_WAIT_S = 0.1  # minimum wait before the time limit, which pauses extend, is checked again


class AgentTimeout(Exception):
    """Error of an agent that exceeded its time limit; distinct from a ``TimeoutError`` that the agent raises itself."""


class AgentLoop:
    """Event loop for user coroutines, each with a time limit. Their ``asyncio.to_thread`` calls share ``threads`` threads."""

    def __init__(self, threads: int) -> None:
        self._threads = threads
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None

    async def run[T](self, work: Coroutine[Any, Any, T], seconds: float, paused_s: Callable[[], float]) -> T:
        """Run ``work`` and return its result or raise its error. ``work`` is cancelled if this call is cancelled or times out.

        Raises ``AgentTimeout`` after ``seconds``, not counting the time by which ``paused_s()`` has grown since the call.
        """
        start, paused_before_s = time.monotonic(), paused_s()
        future = asyncio.wrap_future(asyncio.run_coroutine_threadsafe(_without_exit(work), self._ensure_loop()))
        remaining_s = seconds
        try:
            while not (await asyncio.wait([future], timeout=remaining_s))[0]:
                remaining_s = seconds + paused_s() - paused_before_s - (time.monotonic() - start)
                if remaining_s <= 0:
                    raise AgentTimeout
                remaining_s = max(remaining_s, MIN_WAIT_S)
        finally:
            future.cancel()
        return future.result()

    def close(self) -> None:
        """Stop the loop, cancel its tasks, and block up to ``JOIN_S`` until its thread has ended.

        If an agent blocks the thread or ignores its cancellation for longer, the thread remains until the process ends.
        """
        if self._loop is not None and self._thread is not None:
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join(JOIN_S)
            self._loop = self._thread = None

    def _ensure_loop(self) -> asyncio.AbstractEventLoop:
        if self._loop is None:
            self._loop = asyncio.new_event_loop()
            self._loop.set_default_executor(ThreadPoolExecutor(self._threads, "agent"))
            self._thread = threading.Thread(target=self._serve, args=(self._loop,), name="agents", daemon=True)
            self._thread.start()
        return self._loop

    @staticmethod
    def _serve(loop: asyncio.AbstractEventLoop) -> None:
        asyncio.set_event_loop(loop)
        while True:
            try:
                loop.run_forever()
                break
            except (SystemExit, KeyboardInterrupt):  # raised by an agent's task; the task's waiter receives it too
                continue
        tasks = asyncio.all_tasks(loop)
        for task in tasks:
            task.cancel()
        loop.run_until_complete(asyncio.gather(*tasks, return_exceptions=True))
        loop.close()


async def _without_exit[T](work: Coroutine[Any, Any, T]) -> T:
    """Return the result of ``work``. Raises ``RuntimeError`` if it raises SystemExit or KeyboardInterrupt.

    These would interrupt the loop, which all agents share.
    """
    try:
        return await work
    except (SystemExit, KeyboardInterrupt) as error:
        raise RuntimeError(f"the agent ended its process: {error!r}") from error
