"""Server that forks the drivers of tests/cluster/drivers.py.

A short driver would spend nine tenths of its CPU time on imports, which the server has done already. ``python -m
tests.cluster.driver_server <fd>`` forks until the other end of the socket ``fd`` is closed. A request is the JSON of
the driver's arguments and limit, with three files: stdin, stderr, and a connection for the process id and the exit
code.
"""

from __future__ import annotations

import atexit
import json
import os
import selectors
import signal
import socket
import subprocess
import sys
import time
from functools import cache
from pathlib import Path

from slime_like.util.deadline import scale
from tests.cluster import drivers

REPOSITORY = Path(__file__).resolve().parents[2]
MAX_REQUEST_BYTES = 2**16
REPLY_S = 60.0


class ForkedDriver:
    """Driver in a fork of the server, with the part of ``subprocess.Popen`` that the tests use."""

    def __init__(self, case: str, run_dir: Path, limit_s: float) -> None:
        self.returncode: int | None = None
        self._connection, remote = socket.socketpair()
        self._connection.settimeout(REPLY_S * scale())
        stderr, writer = os.pipe()
        self._stderr = open(stderr)  # noqa: SIM115 (closed by communicate)
        with remote, open(os.devnull) as stdin:
            request = json.dumps([case, str(run_dir), limit_s]).encode()
            socket.send_fds(start_server(), [request], [stdin.fileno(), writer, remote.fileno()])
        os.close(writer)
        self._replies = self._connection.makefile()
        self.pid = int(self._replies.readline())

    def communicate(self, timeout: float) -> tuple[None, str]:
        """Return None and the text on stderr once the driver has ended.

        Raises ``TimeoutExpired`` if stderr is silent and still open when ``timeout`` seconds have passed.
        """
        text, end = b"", time.monotonic() + timeout
        with selectors.DefaultSelector() as selector, self._stderr:
            selector.register(self._stderr, selectors.EVENT_READ)
            while selector.select(max(0.0, end - time.monotonic())):
                data = os.read(self._stderr.fileno(), 2**16)
                if not data:
                    break
                text += data
            else:
                raise subprocess.TimeoutExpired("driver", timeout, stderr=text)
        with self._connection, self._replies:
            self.returncode = int(self._replies.readline())
        return None, text.decode()

    def send_signal(self, number: int) -> None:
        """Send a signal to the supervisor, the driver's parent process."""
        os.kill(self.pid, number)

    def kill(self) -> None:
        """Kill the supervisor."""
        self.send_signal(signal.SIGKILL)


@cache
def start_server() -> socket.socket:
    """Return a socket for requests to the server of this process. The first call starts the server.

    The server is stopped when this process exits.
    """
    client, remote = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with remote:
        process = subprocess.Popen(
            [sys.executable, "-m", __name__, str(remote.fileno())], cwd=REPOSITORY, pass_fds=(remote.fileno(),)
        )

    def stop() -> None:
        client.close()
        process.wait(REPLY_S * scale())

    atexit.register(stop)
    return client


def serve(listener: socket.socket) -> list[str] | None:
    """Fork a process for each request until end of file, then return None.

    In each fork, return the driver's arguments at once.
    """
    connections: dict[int, tuple[int, socket.socket]] = {}  # by pidfd of the fork, readable at its end
    with selectors.DefaultSelector() as selector:
        selector.register(listener, selectors.EVENT_READ)
        while True:
            for key, _ in selector.select():
                if key.fd in connections:
                    selector.unregister(key.fd)
                    pid, connection = connections.pop(key.fd)
                    os.close(key.fd)
                    with connection:
                        code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
                        connection.sendall(f"{code}\n".encode())
                    continue
                request, files, _, _ = socket.recv_fds(listener, MAX_REQUEST_BYTES, 3)
                if not request:
                    return None
                stdin, stderr, reply = files
                pid = os.fork()
                if pid == 0:
                    for file in (listener, *(connection for _, connection in connections.values())):
                        file.close()
                    for file in (reply, *connections):
                        os.close(file)
                    return begin(request, stdin, stderr)
                for file in (stdin, stderr):
                    os.close(file)
                connection = socket.socket(fileno=reply)
                connection.sendall(f"{pid}\n".encode())
                handle = os.pidfd_open(pid)
                connections[handle] = pid, connection
                selector.register(handle, selectors.EVENT_READ)


def begin(request: bytes, stdin: int, stderr: int) -> list[str]:
    """Give this fork its own session, and the files and environment of the request; return the driver's arguments."""
    case, run_dir, limit_s = json.loads(request)
    os.setsid()
    for target, source in ((0, stdin), (2, stderr)):
        os.dup2(source, target)
        os.close(source)
    os.environ["LIMIT_S"] = str(limit_s)
    return [case, run_dir]


if __name__ == "__main__":
    with socket.socket(fileno=int(sys.argv[1])) as server_socket:
        driver_arguments = serve(server_socket)
    if driver_arguments is not None:
        sys.exit(drivers.main(driver_arguments[0], Path(driver_arguments[1])))
