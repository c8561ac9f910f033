"""Progress messages during the start of a run."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field

QUIET_S = 10.0


@dataclass(slots=True)
class Progress:
    """Printer of progress lines with the seconds since the start.

    It prints a line for each ready component and, during a wait, after every 10 s without a line. Example:
    ``run: trainer is up after 6 s; waiting for engines``.
    """

    say: Callable[[str], None]
    clock: Callable[[], float] = time.monotonic
    _started: float = field(init=False)
    _last_message: float = field(init=False)

    def __post_init__(self) -> None:
        self._started = self._last_message = self.clock()

    def ready(self, component: str, waits_for: str = "") -> None:
        """Print the text ``component``, such as "trainer is up", and the components that the run waits for next, if any."""
        self._say(f"{component} after {self._seconds()} s" + (f"; waiting for {waits_for}" if waits_for else ""))

    def waiting(self, waits_for: str) -> None:
        """Print that the run still waits for ``waits_for``, unless it has printed a line within the last ``QUIET_S``.

        Callers call this about every second.
        """
        if self.clock() - self._last_message >= QUIET_S:
            self._say(f"still waiting for {waits_for} after {self._seconds()} s")

    def _seconds(self) -> str:
        return f"{self.clock() - self._started:.0f}"

    def _say(self, text: str) -> None:
        self._last_message = self.clock()
        self.say(text)
