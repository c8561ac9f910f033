"""The driver's side of its connection to the supervisor (``cluster/supervise/supervisor.py``).

A socket connects the two processes; EOF on it means that the other process has ended.

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

CONFIRM_S = 30.0  # for the supervisor to answer

_line: socket.socket | None = None
_ray_confirmed = threading.Event()  # set when the supervisor has confirmed that Ray is alive
_folders: list[Path] = []  # to remove if the supervisor dies
_numbers = itertools.count()


def drive(run: Callable[[], int], line: socket.socket) -> NoReturn:
    """Run the driver ``run`` in this process, then end the process.

    The parent process is the supervisor, which has the other end of ``line``. The exit code is the one that ``run`` returns
    or raises as ``SystemExit``, or 1 after another exception.
    """
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
    _send(kind="done")
    leave(code)


def connect(line: socket.socket) -> None:
    """Use ``line`` as the connection to the supervisor.

    Set ``process_tree.MARK`` in the environment of this process. Programs that are started later inherit this variable and are
    found by it. Start a thread that, when the supervisor dies, kills this process and its descendants and removes the folders
    that ``report_folder`` was given.
    """
    global _line
    _line = line
    os.environ[process_tree.MARK] = secrets.token_hex(8)
    threading.Thread(target=_watch_supervisor, args=(line,), name="supervisor-watch", daemon=True).start()


def _send(**message: Any) -> None:
    """Send a message, one line of JSON, to the supervisor, if there is one. ``DriverState.update`` reads it."""
    if _line is not None:
        with suppress(OSError):  # the supervisor died: this process is about to be killed
            _line.sendall(json.dumps(message).encode() + b"\n")


def report_run_dir(run_dir: Path, rings: Path) -> None:
    """Report the folder for crash bundles, and ``rings``, the folder in shared memory with the ranks' records of collectives.

    ``rings`` is removed at the end of the run.
    """
    _send(kind="run_dir", run_dir=str(run_dir))
    report_folder(rings)


def report_folder(folder: Path) -> None:
    """Report a folder to remove at the end of the run, such as shared memory or Ray's files and sockets."""
    _folders.append(folder)
    _send(kind="folder", folder=str(folder))


def report_ray(pids: dict[str, int], logs: Path | None) -> None:
    """Report the pids of Ray's processes, by name, and the folder of Ray's logs. The death of such a process ends the run."""
    _send(kind="ray", pids=pids, logs=None if logs is None else str(logs))


def confirm_ray() -> None:
    """Wait until the supervisor confirms that Ray is alive, at most ``CONFIRM_S`` times the deadline factor.

    If a Ray process has died, the supervisor ends the run instead. When Ray dies, its actors die too: without this check
    the driver might blame the first lost actor. Without a supervisor, do nothing.
    """
    if _line is not None:
        _ray_confirmed.clear()
        _send(kind="check_ray")
        _ray_confirmed.wait(CONFIRM_S * scale())


def report_teardown(code: int) -> None:
    """Report the start of the teardown and the exit code of the run. From then on, the death of a process is not a fault."""
    _send(kind="teardown", code=code)


@contextmanager
def bounded_call(deadline: Deadline, waits_for: str, *, at_once: bool = False) -> Generator[None]:
    """Bound a library call that has no timeout of its own: the supervisor ends the run when ``deadline`` passes.

    With ``at_once``, SIGINT, SIGTERM or SIGHUP ends the run immediately during the call, because there is nothing to save
    yet.
    """
    number = next(_numbers)
    _send(
        kind="call_begins",
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
        _send(kind="call_ends", number=number)


def _leave_terminal() -> None:
    """Replace stdin with /dev/null if it is a terminal.

    The kernel suspends a background process group that reads from a terminal.
    """
    if os.isatty(0):
        null = os.open(os.devnull, os.O_RDONLY)
        os.dup2(null, 0)
        os.close(null)


def _watch_supervisor(line: socket.socket) -> None:
    with suppress(OSError):
        while line.recv(1):
            _ray_confirmed.set()
    process_tree.kill(process_tree.descendants())
    process_tree.kill(process_tree.find_marked(os.environ[process_tree.MARK]))
    for folder in _folders:
        shutil.rmtree(folder, ignore_errors=True)
    os.kill(os.getpid(), signal.SIGKILL)
