"""Client of tests/e2e/worker_server.py: runs the command of a starting Python process in a fork of the server.

It imports little, because its imports delay each Ray worker, and nothing from ``tests``, which is not on a worker's
path.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
from pathlib import Path
from typing import NoReturn

ADDRESS = "SLIME_LIKE_TEST_WORKER_SERVER"  # path of the server's socket; its log is in the same folder
SCRIPT = "/ray/_private/workers/default_worker.py"  # script of a worker
DRIVER = "/train.py"
NODE = ["-m", "tests.nodes.raylet"]
FORK_DRIVER = "SLIME_LIKE_TEST_FORK_DRIVER"  # in the environment of a driver or node that is to be forked
LOG = "log"
START_S = 60.0
NUM_BYTES = 8  # of the length before a request


def forks(command: list[str]) -> bool:
    """Return whether a command is to run in a fork of the server: a worker, or with ``FORK_DRIVER`` a train.py or a node."""
    if ADDRESS not in os.environ or len(command) < 2:
        return False
    is_requested = command[1].endswith(DRIVER) or command[1:3] == NODE
    return command[1].endswith(SCRIPT) or (is_requested and FORK_DRIVER in os.environ)


def run_in_fork(command: list[str]) -> NoReturn:
    """Run ``command`` in a fork of the server with this process's files, folder and environment; exit as it exits.

    The server kills the fork when this process ends.
    """
    environment = {name: value for name, value in os.environ.items() if name != FORK_DRIVER}
    try:
        replies, _ = request_fork(command[1:], os.getcwd(), environment, [0, 1, 2])
        code = json.loads(replies.readline() or b"1")
    except (OSError, ValueError) as error:
        fail(str(error))
    if code < 0:
        if -code not in (signal.SIGKILL, signal.SIGSTOP):
            signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    os._exit(code)


def request_fork(
    arguments: list[str], folder: str, environment: dict[str, str], files: list[int]
) -> tuple[socket.SocketIO, int]:
    """Start a fork with ``files`` as its standard files. Return a file with a line for the fork's exit code, and the fork's process id.

    The server kills the fork when the file is closed. Raises ``OSError`` or ``ValueError`` if the server did not fork.
    """
    with socket.socket(socket.AF_UNIX) as connection:
        connection.settimeout(START_S * float(os.environ.get("SLIME_LIKE_DEADLINE_FACTOR", "1")))
        connection.connect(environment[ADDRESS])
        request = {"arguments": arguments, "folder": folder, "environment": environment}
        data = json.dumps(request).encode()
        socket.send_fds(connection, [len(data).to_bytes(NUM_BYTES)], files)
        connection.sendall(data)
        replies = connection.makefile("rb", buffering=0)
        reply = json.loads(replies.readline() or b'{"error": "no reply"}')
        if "error" in reply:
            raise ValueError(reply["error"])
        connection.settimeout(None)
        return replies, reply["pid"]


def fail(reason: str) -> NoReturn:
    """Print the reason and the last lines of the server's log; exit with code 1."""
    log = Path(os.environ[ADDRESS]).with_name(LOG)
    text = log.read_text(errors="replace")[-3000:] if log.exists() else "no log: the server has ended"
    sys.stderr.write(f"fork of a worker (tests/e2e/worker_server.py): {reason}\nlog of the server:\n{text}\n")
    sys.stderr.flush()
    os._exit(1)
