"""Start and stop of the phases of a step, in unix seconds, so that times of several processes can be compared."""

from __future__ import annotations

import threading
import time
from collections.abc import Generator
from contextlib import contextmanager


class Spans:
    """Recorder of phases.

    Example: ``with spans("train"): ...`` then ``spans.drain()`` gives ``{"train": (start, stop)}``. A name recorded twice
    before a drain keeps its earliest start and its latest stop.
    """

    def __init__(self) -> None:
        self._spans: dict[str, tuple[float, float]] = {}
        self._lock = threading.Lock()

    @contextmanager
    def __call__(self, name: str) -> Generator[None]:
        """Record the time of a block, even if it raises."""
        start = time.time()
        try:
            yield
        finally:
            self.add(name, start, time.time())

    def add(self, name: str, start: float, stop: float) -> None:
        """Record a phase with start and stop in unix seconds, such as one that another process timed.

        If the name was recorded since the last drain, keep the earlier start and the later stop.
        """
        with self._lock:
            previous = self._spans.get(name)
            self._spans[name] = (start, stop) if previous is None else (min(start, previous[0]), max(stop, previous[1]))

    def drain(self) -> dict[str, tuple[float, float]]:
        """Return the phases recorded since the last call."""
        with self._lock:
            spans, self._spans = self._spans, {}
        return spans
