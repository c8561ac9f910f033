"""Start and end of the worker process of an engine's rank, and connections to workers that others started."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from slime_like.errors import SlimeLikeError
from slime_like_plugins.remote_experts import key
from slime_like_plugins.remote_experts.connection import Connection, PeerLost

MODULE = "slime_like_plugins.remote_experts.worker"
END_S = 2.0
RETRY_S = 0.2


@dataclass(frozen=True, slots=True)
class WorkerOrigin:
    """A worker to start, or the address of one that runs."""

    address: str = ""  # HOST:PORT; empty: start one
    key_file: Path | None = None  # with an address
    threads: int = 1
    device: str = "cpu"
    slowdown: float = 1.0


class ExpertProcess:
    """A worker that this process started; it ends with this process, since its socket then closes."""

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
        """End the process: wait ``END_S`` for it to exit after its socket was closed, then kill it. Never hangs."""
        self.socket.close()
        try:
            self._process.wait(END_S)
        except subprocess.TimeoutExpired:
            self._process.send_signal(signal.SIGKILL)  # also ends a stopped process
            try:
                self._process.wait(END_S)
            except subprocess.TimeoutExpired:
                return  # in an uninterruptible call of the kernel; nothing can be done

    def kill(self) -> None:
        """End the process at once."""
        self._process.send_signal(signal.SIGKILL)
        self.stop()


def connect(origin: WorkerOrigin, name: str, seconds: float) -> Connection:
    """Connect to a worker that listens, and prove the key. Retries until ``seconds`` have passed.

    Raises ``PeerLost`` if nothing listens there, ``FrameError`` if the worker has another key.
    """
    host, port = key.parse_address(origin.address)
    assert origin.key_file is not None, "rules require a key file with an address"
    secret = key.read_key(origin.key_file)
    until = time.monotonic() + seconds
    while True:
        try:
            sock = socket.create_connection((host, port), timeout=max(RETRY_S, until - time.monotonic()))
            connection = Connection(sock, name, key.MAX_PAYLOAD)
            break
        except OSError as error:
            if time.monotonic() + RETRY_S > until:
                raise PeerLost(f"{name}: cannot connect to {origin.address} ({error.strerror or error})") from error
            time.sleep(RETRY_S)
    try:
        key.prove(connection, secret, name)
    except SlimeLikeError:
        connection.close()
        raise
    return connection
