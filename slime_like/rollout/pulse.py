"""Whether this process's event loop runs: while something holds it up, no answer of an engine is read."""

from __future__ import annotations

import asyncio
import time
from types import TracebackType
from typing import Self

BEAT_S = 0.1
LEAST_S = 0.5  # a loop that is late by less has read what came meanwhile well enough


class Pulse:
    """Beats in the running loop while its ``with`` block lasts."""

    def __init__(self) -> None:
        self._last = 0.0
        self._held_s = 0.0  # before the last beat
        self._next: asyncio.TimerHandle | None = None

    @property
    def held_s(self) -> float:
        """Seconds for which the loop was held up just now; 0 where it ran."""
        late = max(self._held_s, self._late())
        return late if late > LEAST_S else 0.0

    def __enter__(self) -> Self:
        self._last = time.monotonic()
        self._beat()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._next is not None:
            self._next.cancel()

    def _late(self) -> float:
        return time.monotonic() - self._last - BEAT_S

    def _beat(self) -> None:
        self._held_s = self._late()
        self._last = time.monotonic()
        self._next = asyncio.get_running_loop().call_later(BEAT_S, self._beat)
