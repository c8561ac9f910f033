"""Exit of a process that used gloo or NCCL."""

from __future__ import annotations

import os
import sys
from typing import NoReturn


def leave(code: int) -> NoReturn:
    """Flush stdout and stderr and exit with ``code`` immediately, without running exit handlers.

    A normal exit may crash. A gloo thread that is still releasing a tensor takes the GIL, and CPython before 3.14 ends such a
    thread during finalization, which aborts the process ("terminate called without an active exception"). The heartbeat thread
    of NCCL's groups takes the GIL too, and can then end the process with a segmentation fault.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
