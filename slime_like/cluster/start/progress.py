"""What a start waits for, told to the person at the terminal."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field

QUIET_S = 10.0


@dataclass(slots=True)
class Progress:
    """Lines with the seconds since the start: one per thing that is ready, and one after each 10 s in which nothing was.

    Example: ``run: trainer ready after 6 s; waiting for engine 0``.
    """

    say: Callable[[str], None]
    clock: Callable[[], float] = time.monotonic
    _started: float = field(init=False)
    _spoke: float = field(init=False)

    def __post_init__(self) -> None:
        self._started = self._spoke = self.clock()

    def ready(self, what: str, waits_for: str = "") -> None:
        """``what`` is done; ``waits_for`` is next."""
        self._say(f"{what} after {self._seconds()} s" + (f"; waiting for {waits_for}" if waits_for else ""))

    def waiting(self, waits_for: str) -> None:
        """Called every second or so of a wait."""
        if self.clock() - self._spoke >= QUIET_S:
            self._say(f"still waiting for {waits_for} after {self._seconds()} s")

    def _seconds(self) -> str:
        return f"{self.clock() - self._started:.0f}"

    def _say(self, text: str) -> None:
        self._spoke = self.clock()
        self.say(text)
