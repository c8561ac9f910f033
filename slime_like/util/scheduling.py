"""Choice of the kernel's scheduling policy for processes that exchange data through gloo."""

from __future__ import annotations

import contextlib
import os


def use_batch_scheduling() -> None:
    """Schedule this thread, and threads and processes that it starts later, so that their wakeups preempt no running thread.

    Otherwise, a rank woken by a message would often preempt the sender on the core that they share, while the sender holds the
    lock of the connection. The I/O thread of gloo then spins until the sender runs again. Does nothing if the policy is not the
    default one, if the system does not permit or support the change, or on systems other than Linux.
    """
    if not hasattr(os, "SCHED_BATCH"):
        return
    with contextlib.suppress(OSError):  # a container's seccomp profile, or a sandbox with its own kernel
        if os.sched_getscheduler(0) == os.SCHED_OTHER:
            os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
