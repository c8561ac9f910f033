"""A train.py that is a fork of tests/e2e/worker_server.py: its imports would take most of the CPU time of a short run's driver."""

from __future__ import annotations

import json
import os
import select
import signal
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO

from tests.e2e.forked.fork_client import request_fork


class ForkedTraining:
    """The part of ``subprocess.Popen`` that ``Training`` uses. The fork has a session of its own."""

    def __init__(self, command: list[str], folder: Path, environment: dict[str, str], output: BinaryIO) -> None:
        self.returncode: int | None = None
        self._replies, self.pid = request_fork(command, str(folder), environment, [0, output.fileno(), output.fileno()])

    def poll(self) -> int | None:
        """Return the exit code, or None if the process runs."""
        if self.returncode is None and select.select([self._replies], [], [], 0)[0]:
            return self.wait()
        return self.returncode

    def wait(self) -> int:
        """Wait for the end of the process and return its exit code."""
        if self.returncode is None:
            with self._replies:
                line = self._replies.readline()
            assert line, "the server of tests/e2e/worker_server.py has ended"
            self.returncode = int(json.loads(line))
        return self.returncode

    def send_signal(self, number: signal.Signals) -> None:
        """Send a signal to the process if it runs."""
        if self.poll() is None:
            with suppress(ProcessLookupError):  # the server has reaped it since
                os.kill(self.pid, number)
