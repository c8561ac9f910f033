"""How long this process's event loop ran: while something holds it up, no answer of an engine is read."""

from __future__ import annotations

import asyncio
import time
from types import TracebackType
from typing import Self

BEAT_S = 0.1
LEAST_S = 0.5  # what holds a loop up for less costs no answer


class EventLoopMonitor:
    """Beats in the running loop while its ``with`` block lasts."""

    def __init__(self) -> None:
        self._began = self._last = 0.0
        self._held_s = 0.0
        self._next: asyncio.TimerHandle | None = None

    @property
    def held_s(self) -> float:
        """Seconds for which the loop was held up since the block began."""
        return self._held_s + self._late()

    @property
    def ran_s(self) -> float:
        """Seconds for which it ran."""
        return time.monotonic() - self._began - self.held_s

    def __enter__(self) -> Self:
        self._began = self._last = time.monotonic()
        self._beat()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._next is not None:
            self._next.cancel()

    def _late(self) -> float:
        late = time.monotonic() - self._last - BEAT_S
        return late if late > LEAST_S else 0.0

    def _beat(self) -> None:
        self._held_s += self._late()
        self._last = time.monotonic()
        self._next = asyncio.get_running_loop().call_later(BEAT_S, self._beat)
