"""Engine server on a phantom GPU, forked from a process that has imported SGLang: see ``forks.py``.

SGLang starts the server's workers as in a user's run: new processes that import the module of the server.
"""

from __future__ import annotations

import faulthandler
import os
import runpy
import subprocess
import tempfile
import time
import traceback
from typing import BinaryIO, NoReturn, cast

from slime_like.rollout.engine.server import EngineServer
from tests.phantom.forks import fork

POLL_S = 0.01


class ForkedServer(EngineServer):
    """``EngineServer`` whose process is a fork of this one, which must not have used the GPU."""

    def _spawn(self, log: BinaryIO, environment: dict[str, str]) -> subprocess.Popen[bytes]:
        return cast("subprocess.Popen[bytes]", ForkedServerProcess(log, environment))


class ForkedServerProcess:
    """The part of ``subprocess.Popen`` that ``EngineServer`` uses."""

    def __init__(self, log: BinaryIO, environment: dict[str, str]) -> None:
        faulthandler.cancel_dump_traceback_later()  # ends its thread
        stdin, writer = os.pipe()
        self.pid = fork()
        if self.pid == 0:
            os.close(writer)
            run_server(stdin, log.fileno(), environment)
        os.close(stdin)
        self.stdin = os.fdopen(writer, "wb")
        self._code: int | None = None

    def poll(self) -> int | None:
        """Return the exit code, or None if the process is running."""
        if self._code is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            self._code = os.waitstatus_to_exitcode(status) if pid else None
        return self._code

    def wait(self, timeout: float) -> int:
        """Return the exit code. Raises ``subprocess.TimeoutExpired`` if the process does not end in ``timeout`` seconds."""
        end = time.monotonic() + timeout
        while (code := self.poll()) is None:
            if time.monotonic() > end:
                raise subprocess.TimeoutExpired("engine", timeout)
            time.sleep(POLL_S)
        return code


def run_server(stdin: int, log: int, environment: dict[str, str]) -> NoReturn:
    """Run ``python -m slime_like.rollout.engine.main`` in this fork."""
    try:
        os.setsid()
        for source, target in ((stdin, 0), (log, 1), (log, 2)):
            os.dup2(source, target)
        os.environ.clear()
        os.environ.update(environment)
        tempfile.tempdir = None
        runpy.run_module("slime_like.rollout.engine.main", run_name="__main__", alter_sys=True)
    except BaseException:  # noqa: BLE001 (fault boundary: the log has the error)
        traceback.print_exc()
    os._exit(1)
