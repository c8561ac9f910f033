"""When each phase ran, in unix seconds: comparable between the processes of a run, so that overlap can be read off."""

from __future__ import annotations

import threading
import time
from collections.abc import Generator
from contextlib import contextmanager


class Spans:
    """Records phases until drained.

    Example: ``with spans("train"): ...`` then ``spans.drain()`` gives ``{"train": (start, stop)}``. A name recorded twice
    before a drain keeps its first start and its last stop.
    """

    def __init__(self) -> None:
        self._found: dict[str, tuple[float, float]] = {}
        self._lock = threading.Lock()

    @contextmanager
    def __call__(self, name: str) -> Generator[None]:
        """Time a block, whether it succeeds or not."""
        start = time.time()
        try:
            yield
        finally:
            self.add(name, start, time.time())

    def add(self, name: str, start: float, stop: float) -> None:
        """Record a phase that was timed elsewhere."""
        with self._lock:
            before = self._found.get(name)
            self._found[name] = (start, stop) if before is None else (before[0], max(stop, before[1]))

    def drain(self) -> dict[str, tuple[float, float]]:
        """Everything recorded since the last drain."""
        with self._lock:
            found, self._found = self._found, {}
        return found
