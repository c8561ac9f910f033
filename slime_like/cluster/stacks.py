"""Stacks of every process of a run, on demand: what a crash bundle shows of a hang."""

from __future__ import annotations

import faulthandler
import os
import signal
from pathlib import Path


def dump_stacks_on_signal(folder: Path, name: str) -> None:
    """On SIGUSR1 write the stacks of all threads of this process to ``folder/<name>.<pid>.<start time>.txt``."""
    folder.mkdir(parents=True, exist_ok=True)
    file = (folder / f"{name}.{os.getpid()}.{start_time(os.getpid())}.txt").open("w")
    faulthandler.register(signal.SIGUSR1, file=file, all_threads=True)


def living(folder: Path) -> dict[str, int]:
    """Name -> process id of every living process of this node that registered in ``folder``.

    The start time guards against a process id that has passed to somebody else.
    """
    found: dict[str, int] = {}
    for path in folder.glob("*.txt"):
        name, pid, started = path.stem.rsplit(".", 2)
        if start_time(int(pid)) == started:
            found[name] = int(pid)
    return found


def request_stacks(folder: Path) -> None:
    """Ask every living process of this node that registered in ``folder`` for its stacks."""
    for pid in living(folder).values():
        os.kill(pid, signal.SIGUSR1)


def start_time(pid: int) -> str:
    """Start time of a process in clock ticks since boot, empty if there is none."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return ""
    return stat.rpartition(")")[2].split()[19]
