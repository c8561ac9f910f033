"""Where agents run: an event loop in a thread of its own, so that one that blocks holds up other agents, not the manager."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from typing import Any

JOIN_S = 5.0
SHORTEST_S = 0.1  # between two looks at a limit that moves


class TooLate(Exception):
    """The limit passed; a ``TimeoutError`` of the work itself is another thing."""


class AgentLoop:
    """Runs coroutines of users, each under a limit. ``threads``: how many of their ``asyncio.to_thread`` run at a time."""

    def __init__(self, threads: int) -> None:
        self._threads = threads
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None

    async def run[T](self, work: Coroutine[Any, Any, T], seconds: float, held_s: Callable[[], float]) -> T:
        """The result of ``work``, or what it raised; whoever waits no more cancels it.

        Raises ``TooLate`` after ``seconds``, those not counted by which ``held_s()`` grows in the meantime.
        """
        started, held = time.monotonic(), held_s()
        found = asyncio.wrap_future(asyncio.run_coroutine_threadsafe(_contained(work), self._started()))
        left = seconds
        try:
            while not (await asyncio.wait([found], timeout=left))[0]:
                left = seconds + held_s() - held - (time.monotonic() - started)
                if left <= 0:
                    raise TooLate
                left = max(left, SHORTEST_S)
        finally:
            found.cancel()
        return found.result()

    def close(self) -> None:
        """Stop the loop. A thread in which an agent blocks is left to the end of the process."""
        if self._loop is not None and self._thread is not None:
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join(JOIN_S)
            self._loop = self._thread = None

    def _started(self) -> asyncio.AbstractEventLoop:
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
            except (SystemExit, KeyboardInterrupt):  # of a task that an agent began: who waits for it is told as well
                continue
        left = asyncio.all_tasks(loop)
        for task in left:
            task.cancel()
        loop.run_until_complete(asyncio.gather(*left, return_exceptions=True))
        loop.close()


async def _contained[T](work: Coroutine[Any, Any, T]) -> T:
    """``work``, in which ``sys.exit`` is an error as any: asyncio would end the thread of all agents by it."""
    try:
        return await work
    except (SystemExit, KeyboardInterrupt) as error:
        raise RuntimeError(f"the agent ended its process: {error!r}") from error
