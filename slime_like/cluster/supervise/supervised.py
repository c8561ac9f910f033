"""The driver's side of its supervisor (``cluster/supervise/supervisor.py``): a socket between the two, on which each sees the other end.

A driver without a supervisor, as one that calls ``launch`` itself, tells nobody.
"""

from __future__ import annotations

import itertools
import json
import os
import secrets
import shutil
import signal
import socket
import sys
import threading
import traceback
from collections.abc import Callable, Generator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NoReturn

from slime_like.cluster.supervise import process_tree
from slime_like.printable import visible
from slime_like.util.deadline import Deadline, scale
from slime_like.util.leave import leave

CLEARED_S = 30.0  # for the supervisor's answer

_line: socket.socket | None = None
_cleared = threading.Event()  # the supervisor has looked, and Ray is alive
_folders: list[Path] = []  # to remove if the supervisor dies
_numbers = itertools.count()


def drive(run: Callable[[], int], line: socket.socket) -> NoReturn:
    """Run the driver in this process, the child of a supervisor at the other end of ``line``, and exit with its code."""
    os.setpgid(0, 0)
    _leave_terminal()
    connect(line)
    code = 1
    try:
        code = run()
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
        if isinstance(end.code, str):
            sys.stderr.write(visible(f"{end.code}\n"))
    except BaseException:  # noqa: BLE001  the last frame of this process
        sys.stderr.write(visible(traceback.format_exc()))
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):
            stream.flush()
    tell(kind="done")
    leave(code)


def connect(line: socket.socket) -> None:
    """Use ``line`` to the supervisor; when the supervisor dies, end this process and everything it has started."""
    global _line
    _line = line
    os.environ[process_tree.MARK] = secrets.token_hex(8)
    threading.Thread(target=_follow, args=(line,), name="supervisor-watch", daemon=True).start()


def tell(**note: Any) -> None:
    """Send ``note`` to the supervisor, if there is one."""
    if _line is not None:
        with suppress(OSError):  # it is gone: this process is about to be
            _line.sendall(json.dumps(note).encode() + b"\n")


def claimed(run_dir: Path, rings: Path) -> None:
    """Tell where crash bundles go, and which shared memory to remove at the end."""
    tell(kind="claimed", run_dir=str(run_dir))
    owns(rings)


def owns(folder: Path) -> None:
    """Tell of a folder to remove at the end: shared memory, Ray's files and sockets."""
    _folders.append(folder)
    tell(kind="owns", folder=str(folder))


def ray_started(pids: dict[str, int], logs: Path | None) -> None:
    """Tell which processes Ray consists of: the death of one ends the run."""
    tell(kind="ray", pids=pids, logs=None if logs is None else str(logs))


def clear_ray() -> None:
    """Return once the supervisor has found every process of Ray alive; where one died, it ends this process with that cause.

    Ray's death takes actors along: without this, the driver might blame the first of those that it misses.
    """
    if _line is not None:
        _cleared.clear()
        tell(kind="suspects")
        _cleared.wait(CLEARED_S * scale())


def ending(code: int) -> None:
    """Tell that the run is being taken down and ends with ``code``: from here on deaths of processes are no faults."""
    tell(kind="ending", code=code)


@contextmanager
def limit(deadline: Deadline, waits_for: str, *, at_once: bool = False) -> Generator[None]:
    """Bound a call into a library that knows no deadline: the supervisor ends the run when ``deadline`` passes.

    ``at_once``: a signal during the call ends the run, of which there is nothing to save yet.
    """
    number = next(_numbers)
    tell(
        kind="begin",
        number=number,
        owner=deadline.owner,
        phase=deadline.phase,
        seconds=deadline.seconds,
        waits_for=waits_for,
        at_once=at_once,
    )
    try:
        yield
    finally:
        tell(kind="end", number=number)


def _leave_terminal() -> None:
    """Read end of file from standard input if it is a terminal, which stops a background group that reads from it."""
    if os.isatty(0):
        null = os.open(os.devnull, os.O_RDONLY)
        os.dup2(null, 0)
        os.close(null)


def _follow(line: socket.socket) -> None:
    with suppress(OSError):
        while line.recv(1):
            _cleared.set()
    process_tree.kill(process_tree.descendants())
    process_tree.kill(process_tree.marked(os.environ[process_tree.MARK]))
    for folder in _folders:
        shutil.rmtree(folder, ignore_errors=True)
    os.kill(os.getpid(), signal.SIGKILL)
