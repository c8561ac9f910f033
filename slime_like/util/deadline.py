"""Deadlines for waits. Their error names the waiting process and the awaited one."""

from __future__ import annotations

import math
import os
import time
from dataclasses import dataclass, field

from slime_like.errors import ConfigError, DeadlineExceeded

FACTOR_VARIABLE = "SLIME_LIKE_DEADLINE_FACTOR"


def scale() -> float:
    """Return ``SLIME_LIKE_DEADLINE_FACTOR`` (default 1), by which every limit on the work of another process is multiplied.

    Set it above 1 on a slow or shared machine. Raises ``ConfigError`` if it is not a positive number.
    """
    text = os.environ.get(FACTOR_VARIABLE, "1")
    try:
        factor = float(text)
    except ValueError:
        factor = 0.0
    if not (0 < factor < math.inf):
        raise ConfigError(f"{FACTOR_VARIABLE}={text!r} must be a positive number, such as 2")
    return factor


@dataclass(frozen=True, slots=True)
class Deadline:
    """A time limit that starts at construction.

    Example: ``Deadline("rollout manager", "collect", 600).remaining("engine 0")`` returns the number of seconds left, or
    raises ``DeadlineExceeded: rollout manager waited 600 s for engine 0 in phase 'collect' ...``.
    """

    owner: str
    phase: str
    seconds: float
    started: float = field(default_factory=time.monotonic)

    @property
    def limit(self) -> float:
        """Return the limit in seconds, multiplied by ``scale()``."""
        return self.seconds * scale()

    def elapsed(self) -> float:
        """Return the seconds since construction."""
        return time.monotonic() - self.started

    def remaining(self, waits_for: str) -> float:
        """Return the number of seconds left. Raises ``DeadlineExceeded``, which names ``waits_for``, if none are left."""
        seconds = self.limit - self.elapsed()
        if seconds <= 0:
            raise self.exceeded(waits_for)
        return seconds

    def exceeded(self, waits_for: str) -> DeadlineExceeded:
        """Return the error to raise if ``waits_for`` did not respond in time."""
        return DeadlineExceeded(
            f"{self.owner} waited {self.elapsed():.0f} s for {waits_for} in phase '{self.phase}' (limit {self.limit:.0f} s; "
            f"set {FACTOR_VARIABLE} above {scale():g} if this machine is just slow)"
        )
