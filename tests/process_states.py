"""States of processes that tests start and that end at any moment."""

from __future__ import annotations

import psutil


def is_alive(pid: int) -> bool:
    """Return whether a process exists and is not a zombie; False even if it ends only during the call."""
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
