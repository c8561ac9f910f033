"""Command that ends with its parent: ``python bound.py PARENT COMMAND...`` execs COMMAND. PARENT is the parent's process id.

Linux kills COMMAND when the thread that started it ends. The parent cannot do this itself: none of its signal handlers runs
when it is killed.
"""

import ctypes
import os
import signal
import sys

PR_SET_PDEATHSIG = 1  # linux/prctl.h; survives execve


def main(parent: int, command: list[str]) -> None:
    """Replace this process by ``command``, or exit if ``parent`` has already ended. Raises ``OSError`` if prctl or exec fails.

    ``command[0]`` is the path of the executable; it is not searched on PATH.
    """
    if ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0):
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG)")
    if os.getppid() == parent:
        os.execv(command[0], command)
    sys.exit(f"the process {parent} that started {command[0]} has ended")


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2:])
