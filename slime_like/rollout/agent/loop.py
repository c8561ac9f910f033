"""Where agents run: an event loop in a thread of its own, so that one that blocks holds up agents, never engines or pushes."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine
from typing import Any

JOIN_S = 5.0


class AgentLoop:
    """Runs coroutines of users, each under a limit."""

    def __init__(self) -> None:
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None

    async def run[T](self, work: Coroutine[Any, Any, T], seconds: float) -> T:
        """The result of ``work``. Raises ``TimeoutError`` after ``seconds``; whoever waits no more cancels it."""
        found = asyncio.run_coroutine_threadsafe(work, self._started())
        return await asyncio.wait_for(asyncio.wrap_future(found), seconds)

    def close(self) -> None:
        """Stop the loop. A thread in which an agent blocks is left to the end of the process."""
        if self._loop is not None and self._thread is not None:
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join(JOIN_S)
            self._loop = self._thread = None

    def _started(self) -> asyncio.AbstractEventLoop:
        if self._loop is None:
            self._loop = asyncio.new_event_loop()
            self._thread = threading.Thread(target=self._serve, args=(self._loop,), name="agents", daemon=True)
            self._thread.start()
        return self._loop

    @staticmethod
    def _serve(loop: asyncio.AbstractEventLoop) -> None:
        asyncio.set_event_loop(loop)
        loop.run_forever()
        left = asyncio.all_tasks(loop)
        for task in left:
            task.cancel()
        loop.run_until_complete(asyncio.gather(*left, return_exceptions=True))
        loop.close()
