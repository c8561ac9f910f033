"""Batch scheduling is inherited by child processes, and replaces only the default policy."""

from __future__ import annotations

import errno
import os
import subprocess
import sys

import pytest

SCRIPT = """
import os, subprocess, sys
from slime_like.util.scheduling import use_batch_scheduling
os.sched_setscheduler(0, int(sys.argv[1]), os.sched_param(0))
use_batch_scheduling()
subprocess.run([sys.executable, "-c", "import os; print(os.sched_getscheduler(0))"], check=True)
"""


@pytest.mark.parametrize(
    ("policy", "expected"),
    [(os.SCHED_OTHER, os.SCHED_BATCH), (os.SCHED_BATCH, os.SCHED_BATCH), (os.SCHED_IDLE, os.SCHED_IDLE)],
)
def test_a_child_has_the_policy(policy: int, expected: int) -> None:
    result = subprocess.run([sys.executable, "-c", SCRIPT, str(policy)], capture_output=True, text=True, check=True)
    assert int(result.stdout) == expected, result.stderr


@pytest.mark.parametrize("number", [errno.EPERM, errno.EINVAL, errno.ENOSYS])
def test_a_refusal_by_the_system_changes_nothing(number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    from slime_like.util import scheduling

    def refuse(pid: int, policy: int, param: os.sched_param) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "sched_getscheduler", lambda pid: os.SCHED_OTHER)
    monkeypatch.setattr(os, "sched_setscheduler", refuse)
    scheduling.use_batch_scheduling()
