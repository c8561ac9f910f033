"""The fault of ``run.debug_kill_at``: the driver dies without a word at a given point, as by SIGKILL from outside."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Generator
from contextlib import contextmanager

from slime_like.config.kill_at import KillAt


@contextmanager
def fatal(kill: KillAt | None, phase: str, rollout_id: int) -> Generator[None]:
    """A phase of the loop that the driver does not survive if it is the one that ``kill`` names."""
    if kill is None or (phase, rollout_id) != (kill.phase, kill.rollout_id):
        yield
        return
    dies = threading.Timer(kill.seconds, os.kill, (os.getpid(), signal.SIGKILL))
    dies.daemon = True
    dies.start()
    yield
    os.kill(os.getpid(), signal.SIGKILL)
