"""Start and end of the worker process of an engine's rank, and connections to workers that are already running."""

from __future__ import annotations

import logging
import os
import signal
import socket
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from slime_like.config.schema.remote_experts import parse_address
from slime_like.errors import DeadlineExceeded, SlimeLikeError
from slime_like.util.deadline import scale
from slime_like_plugins.remote_experts import key
from slime_like_plugins.remote_experts.connection import Connection, PeerLost

logger = logging.getLogger(__name__)
MODULE = "slime_like_plugins.remote_experts.worker"
END_S = 2.0
RETRY_S = 0.2


@dataclass(frozen=True, slots=True)
class WorkerOrigin:
    """Settings of a worker to start, or the address of a running one."""

    address: str = ""  # HOST:PORT; empty: start one
    key_file: Path | None = None  # required with an address
    threads: int = 1
    device: str = "cpu"
    slowdown: float = 1.0


class ExpertProcess:
    """Worker process started by this process. It ends with this process, because its socket then closes."""

    def __init__(self, origin: WorkerOrigin) -> None:
        ours, theirs = socket.socketpair()
        command = [sys.executable, "-m", MODULE, "--fd", str(theirs.fileno()), "--threads", str(origin.threads)]
        command += ["--device", origin.device, "--slowdown", str(origin.slowdown)]
        environment = os.environ | {"OMP_NUM_THREADS": str(origin.threads)}
        with theirs:
            self._process = subprocess.Popen(
                command, env=environment, stdin=subprocess.DEVNULL, pass_fds=(theirs.fileno(),)
            )
        self.socket = ours

    @property
    def pid(self) -> int:
        """Process id."""
        return self._process.pid

    def stop(self) -> None:
        """End the process: close its socket, and kill it if it has not exited after ``END_S``.

        It returns even if the process cannot be killed.
        """
        self.socket.close()
        try:
            self._process.wait(END_S * scale())
        except subprocess.TimeoutExpired:
            self._process.send_signal(signal.SIGKILL)  # also ends a suspended process (SIGSTOP)
            try:
                self._process.wait(END_S * scale())
            except subprocess.TimeoutExpired:
                return  # in an uninterruptible call of the kernel; nothing can be done

    def kill(self) -> None:
        """Kill the process and close its socket."""
        self._process.send_signal(signal.SIGKILL)
        self.stop()


def connect(origin: WorkerOrigin, name: str, seconds: float) -> Connection:
    """Connect to a listening worker, and authenticate with the key.

    While there is no connection, or the worker does not answer (it may be serving another engine), retry for ``seconds``, then
    raise ``PeerLost``. Also raises ``PeerLost`` if the worker closes the connection, as it does if the keys differ,
    ``FrameError`` if it does not know the key or violates the protocol, and ``ConfigError`` if the key file cannot be used.
    """
    assert origin.key_file is not None, "rules require a key file with an address"
    secret = key.read_key(origin.key_file)
    until, is_first = time.monotonic() + seconds, True
    while True:
        try:
            sock = socket.create_connection(
                parse_address(origin.address), timeout=max(RETRY_S, until - time.monotonic())
            )
        except OSError as error:
            problem = f"cannot connect to {origin.address} ({error.strerror or error})"
        else:
            try:
                return _admitted(sock, secret, name, origin.key_file)
            except DeadlineExceeded:
                problem = f"{origin.address} accepts connections but does not answer; the worker may be serving another engine"
        if time.monotonic() + RETRY_S > until:
            raise PeerLost(f"{name}: {problem}")
        if is_first:
            logger.warning("slime_like remote experts: %s: %s; trying again for %.0f s", name, problem, seconds)
        is_first = False
        time.sleep(RETRY_S)


def _admitted(sock: socket.socket, secret: bytes, name: str, key_file: Path) -> Connection:
    """Return a connection over ``sock`` after both ends have proved that they know the key.

    Raises ``PeerLost`` if the worker closes the connection, as it does if the keys differ, ``FrameError`` if it does not know
    the key or violates the protocol, and ``DeadlineExceeded`` if it does not answer.
    """
    connection = Connection(sock, name, key.MAX_PAYLOAD)
    try:
        key.prove(connection, secret, name)
    except PeerLost as error:
        connection.close()
        raise PeerLost(f"{error}; a worker does this if its key differs from the key in {key_file}") from error
    except SlimeLikeError:
        connection.close()
        raise
    return connection
