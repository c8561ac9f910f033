"""Monitor that measures how long this process's event loop was blocked and could not read engine responses."""

from __future__ import annotations

import asyncio
import time
from types import TracebackType
from typing import Self

BEAT_S = 0.1
MIN_BLOCKED_S = 0.5  # shorter delays lose no response


class EventLoopMonitor:
    """Context manager that measures how long the running loop was blocked, by the delays of a periodic callback.

    Read the properties before the first ``await`` after the ``with`` block. The end of the block stops the callback, so later
    time would count as blocked.
    """

    def __init__(self) -> None:
        self._began = self._last = 0.0
        self._blocked_s = 0.0
        self._next: asyncio.TimerHandle | None = None

    @property
    def blocked_s(self) -> float:
        """Seconds since entry for which the loop was blocked, without delays of at most ``MIN_BLOCKED_S``."""
        return self._blocked_s + self._delay_s()

    @property
    def ran_s(self) -> float:
        """Seconds since entry for which the loop was not blocked."""
        return time.monotonic() - self._began - self.blocked_s

    def __enter__(self) -> Self:
        self._began = self._last = time.monotonic()
        self._beat()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._next is not None:
            self._next.cancel()

    def _delay_s(self) -> float:
        delay_s = time.monotonic() - self._last - BEAT_S
        return delay_s if delay_s > MIN_BLOCKED_S else 0.0

    def _beat(self) -> None:
        self._blocked_s += self._delay_s()
        self._last = time.monotonic()
        self._next = asyncio.get_running_loop().call_later(BEAT_S, self._beat)
