"""``python bound.py PARENT COMMAND...`` execs COMMAND, which Linux kills when the thread that started it ends.

A signal handler in the parent cannot do this: nothing runs in a process that is killed.
"""

import ctypes
import os
import signal
import sys

PR_SET_PDEATHSIG = 1  # linux/prctl.h; survives execve


def main(parent: int, command: list[str]) -> None:
    """Exec ``command``. Returns only by an error: the call failed, or ``parent`` ended before the binding."""
    if ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0):
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG)")
    if os.getppid() == parent:
        os.execv(command[0], command)
    sys.exit(f"the process {parent} that asked for {command[0]} is gone")


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2:])
