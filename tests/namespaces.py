"""Namespaces of simulated nodes (tests/nodes/machine.py): entered by forks of servers that run outside of them."""

from __future__ import annotations

import ctypes
import os
import signal

PR_SET_PDEATHSIG = 1  # linux/prctl.h
# The mount namespace is last: /proc shows other processes afterwards.
KINDS = {"pid": os.CLONE_NEWPID, "net": os.CLONE_NEWNET, "uts": os.CLONE_NEWUTS, "mnt": os.CLONE_NEWNS}


def open_namespaces(process: int | str = "self") -> list[int]:
    """Return descriptors of the namespaces of a process, in the order of ``KINDS``."""
    return [os.open(f"/proc/{process}/ns/{kind}", os.O_RDONLY | os.O_CLOEXEC) for kind in KINDS]


def enter_namespaces(namespaces: list[int]) -> None:
    """Continue in a fork in ``namespaces``, and close them. Does nothing if this process is in them.

    This process, which must have one thread, waits for the fork and ends as it ends. The fork ends with this process.
    """
    own = open_namespaces()
    is_elsewhere = any(not os.path.sameopenfile(*pair) for pair in zip(own, namespaces, strict=True))
    if is_elsewhere:
        for namespace, kind in zip(namespaces, KINDS.values(), strict=True):
            os.setns(namespace, kind)
    for namespace in (*own, *namespaces):
        os.close(namespace)
    if is_elsewhere and (pid := os.fork()):
        end_as(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
    if is_elsewhere:
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def end_as(code: int) -> None:
    """End this process with an exit code, or by a signal if ``code`` is negative."""
    if code < 0:
        if -code not in (signal.SIGKILL, signal.SIGSTOP):
            signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    os._exit(code)
