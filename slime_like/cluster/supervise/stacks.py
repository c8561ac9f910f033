"""Stacks of every process of a run, on demand: what a crash bundle shows of a hang."""

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
    """On SIGUSR1 write the stacks of all threads of this process to ``folder/<name>.<pid>.<start time>.txt``."""
    folder.mkdir(parents=True, exist_ok=True)
    file = (folder / f"{name}.{os.getpid()}.{start_time(os.getpid())}.txt").open("w")
    faulthandler.register(signal.SIGUSR1, file=file, all_threads=True)


def living(folder: Path) -> dict[str, int]:
    """Name -> process id of every living process of this node that registered in ``folder``.

    The start time guards against a process id that has passed to somebody else.
    """
    found = (path.stem.rsplit(".", 2) for path in _of_living(folder))
    return {name: int(pid) for name, pid, _ in found}


def request_stacks(folder: Path) -> None:
    """Ask every living process of this node that registered in ``folder`` for its stacks."""
    for pid in living(folder).values():
        with suppress(ProcessLookupError):  # it has ended since
            os.kill(pid, signal.SIGUSR1)


def gather_stacks(folder: Path, seconds: float) -> None:
    """Ask for stacks and wait until all are written, at most ``seconds``, scaled: a stopped process writes none.

    faulthandler writes from a signal handler and reports to nobody: a file that grew and then rests is taken for whole.
    """
    before = _sizes(folder)
    request_stacks(folder)
    last, until = before, time.monotonic() + seconds * scale()
    while time.monotonic() < until:
        time.sleep(POLL_S)
        now = _sizes(folder)
        if now == last and all(now[path] > before.get(path, 0) for path in _of_living(folder) if path in now):
            return
        last = now


def _of_living(folder: Path) -> list[Path]:
    """The files of the processes that live."""
    named = ((path, path.stem.rsplit(".", 2)) for path in folder.glob("*.txt"))
    return [path for path, (_, pid, started) in named if start_time(int(pid)) == started]


def _sizes(folder: Path) -> dict[Path, int]:
    return {path: path.stat().st_size for path in folder.glob("*.txt")}


def start_time(pid: int) -> str:
    """Start time of a process in clock ticks since boot, empty if there is none."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return ""
    return stat.rpartition(")")[2].split()[19]
