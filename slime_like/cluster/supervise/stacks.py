"""Stack dumps of a run's processes on this node, for crash bundles."""

from __future__ import annotations

import faulthandler
import os
import signal
import time
from contextlib import suppress
from pathlib import Path

from slime_like.util.deadline import scale

POLL_S = 0.1


def dump_stacks_on_signal(folder: Path, name: str) -> None:
    """Install a SIGUSR1 handler that writes the stacks of all threads of this process to a file in ``folder``.

    The file is named ``<name>.<pid>.<start time>.txt``.
    """
    folder.mkdir(parents=True, exist_ok=True)
    file = (folder / f"{name}.{os.getpid()}.{start_time(os.getpid())}.txt").open("w")
    faulthandler.register(signal.SIGUSR1, file=file, all_threads=True)


def live_processes(folder: Path) -> dict[str, int]:
    """Return a dict from name to pid of every live process on this node that called ``dump_stacks_on_signal(folder, name)``.

    Start times guard against reused pids.
    """
    parts = (path.stem.rsplit(".", 2) for path in _files_of_live_processes(folder))
    return {name: int(pid) for name, pid, _ in parts}


def request_stacks(folder: Path) -> None:
    """Ask every process of ``live_processes(folder)`` to write its stacks."""
    for pid in live_processes(folder).values():
        with suppress(ProcessLookupError):  # it has ended in the meantime
            os.kill(pid, signal.SIGUSR1)


def gather_stacks(folder: Path, seconds: float) -> None:
    """Request stacks and wait until all are written, at most ``seconds`` times the deadline factor.

    A suspended (SIGSTOP) process writes none. faulthandler writes from a signal handler and gives no notice: a file
    counts as complete once it has grown and its size no longer changes.
    """
    initial = _sizes(folder)
    request_stacks(folder)
    previous, end = initial, time.monotonic() + seconds * scale()
    while time.monotonic() < end:
        time.sleep(POLL_S)
        current = _sizes(folder)
        if current == previous and all(
            current[path] > initial.get(path, 0) for path in _files_of_live_processes(folder) if path in current
        ):
            return
        previous = current


def _files_of_live_processes(folder: Path) -> list[Path]:
    """Return the stack files in ``folder`` whose processes are still alive."""
    name_parts = ((path, path.stem.rsplit(".", 2)) for path in folder.glob("*.txt"))
    return [path for path, (_, pid, start) in name_parts if start_time(int(pid)) == start]


def _sizes(folder: Path) -> dict[Path, int]:
    return {path: path.stat().st_size for path in folder.glob("*.txt")}


def start_time(pid: int) -> str:
    """Return the start time of a process in clock ticks since boot; empty if the process does not exist."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return ""
    return stat.rpartition(")")[2].split()[19]
