"""The end of what user code has started, on a node whose Ray was there before the run: no supervisor adopts it there.

``python -m slime_like.cluster.supervise.reaper MARK`` leaves the process that starts it, which Ray kills with its direct children. It
reads that process's pipe to the end, then kills every process that has ``MARK`` in its environment.
"""

from __future__ import annotations

import os
import secrets
import subprocess
import sys
from contextlib import suppress

import psutil

from slime_like.cluster.supervise import process_tree

EXIT_S = 5.0


class Reaper:
    """From its start on this process marks its children. They end with it, however it ends, or at ``close``."""

    def __init__(self) -> None:
        self._mark = secrets.token_hex(8)
        command = [sys.executable, "-m", __name__, self._mark]
        environment = os.environ | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}  # Ray changed it
        # No longer a child once it has told its id, and out of reach of signals to a process group.
        self._starter = subprocess.Popen(
            command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True
        )
        assert self._starter.stdin is not None and self._starter.stdout is not None
        self._reaper = psutil.Process(int(self._starter.stdout.readline()))
        self._starter.wait()
        os.environ[process_tree.MARK] = self._mark

    def close(self) -> None:
        """Kill what this process has started, directly or not, and the reaper's own process."""
        process_tree.kill(process_tree.marked(self._mark))
        assert self._starter.stdin is not None
        self._starter.stdin.close()
        with suppress(psutil.Error):
            self._reaper.wait(EXIT_S)


def reaper() -> Reaper | None:
    """Return a reaper where no supervisor has marked this process."""
    return None if process_tree.MARK in os.environ else Reaper()


def main(mark: str) -> None:
    """Wait for the end of the process at the other end of stdin, then kill what has ``mark``."""
    if pid := os.fork():
        os.write(1, f"{pid}\n".encode())
        os._exit(0)
    os.dup2(2, 1)
    while os.read(0, 1):
        pass
    while left := process_tree.marked(mark):  # a process that is being started may follow
        process_tree.kill(left)
        psutil.wait_procs(left, timeout=process_tree.WAIT_S)


if __name__ == "__main__":
    main(sys.argv[1])
