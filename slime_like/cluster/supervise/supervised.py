"""The driver's side of the supervisor (``cluster/supervise/supervisor.py``): a socket whose EOF shows the other's end.

A driver without a supervisor, such as a program that calls ``launch``, sends nothing.
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
_cleared = threading.Event()  # set when the supervisor has confirmed that Ray is alive
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
    """Use ``line`` to the supervisor; if the supervisor dies, kill this process and its descendants."""
    global _line
    _line = line
    os.environ[process_tree.MARK] = secrets.token_hex(8)
    threading.Thread(target=_follow, args=(line,), name="supervisor-watch", daemon=True).start()


def tell(**note: Any) -> None:
    """Send ``note`` to the supervisor, if there is one."""
    if _line is not None:
        with suppress(OSError):  # the supervisor died: this process is about to be killed
            _line.sendall(json.dumps(note).encode() + b"\n")


def claimed(run_dir: Path, rings: Path) -> None:
    """Report the folder of crash bundles, and the shared memory to remove at the end."""
    tell(kind="claimed", run_dir=str(run_dir))
    owns(rings)


def owns(folder: Path) -> None:
    """Report a folder to remove at the end: shared memory, Ray's files and sockets."""
    _folders.append(folder)
    tell(kind="owns", folder=str(folder))


def ray_started(pids: dict[str, int], logs: Path | None) -> None:
    """Report Ray's processes: the death of one ends the run."""
    tell(kind="ray", pids=pids, logs=None if logs is None else str(logs))


def clear_ray() -> None:
    """Wait until the supervisor confirms that Ray is alive; if a Ray process died, it ends the run with that cause.

    When Ray dies, its actors die too: without this check the driver might blame the first lost actor.
    """
    if _line is not None:
        _cleared.clear()
        tell(kind="suspects")
        _cleared.wait(CLEARED_S * scale())


def ending(code: int) -> None:
    """Report the start of the teardown, which ends with ``code``: deaths of processes are no longer faults."""
    tell(kind="ending", code=code)


@contextmanager
def limit(deadline: Deadline, waits_for: str, *, at_once: bool = False) -> Generator[None]:
    """Bound a library call without a timeout: the supervisor ends the run when ``deadline`` passes.

    ``at_once``: a signal during the call ends the run immediately, as there is nothing to save yet.
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
    """Replace a terminal stdin by /dev/null: a background group that reads from a terminal is stopped."""
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
