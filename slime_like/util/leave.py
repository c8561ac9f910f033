"""The end of a process that was in a world of gloo."""

from __future__ import annotations

import os
import sys
from typing import NoReturn


def leave(code: int) -> NoReturn:
    """End this process with ``code`` at once, what it has said being flushed; nothing registered for its exit runs.

    A thread of gloo that still lets go of a tensor asks for the GIL, and CPython before 3.14 ends such a thread while it
    finalizes, which aborts the process ("terminate called without an active exception").
    """
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
