"""Kill processes started by user code if no supervisor adopts them: in a joined Ray cluster, or if the driver has none.

``python -m slime_like.cluster.supervise.reaper MARK`` detaches from its parent, because Ray kills the parent's direct children
along with it. It reads the parent's pipe until EOF, then kills every process with ``MARK`` in its environment.
"""

from __future__ import annotations

import os
import secrets
import subprocess
import sys
from contextlib import suppress
from multiprocessing.connection import wait

import psutil

from slime_like.cluster.supervise import process_tree
from slime_like.errors import DeadlineExceeded, ProcessLost
from slime_like.rollout.engine.processes import describe_exit
from slime_like.util.deadline import scale

START_S = 60.0
EXIT_S = 5.0


class Reaper:
    """Handle of a reaper process, which the constructor starts.

    Once the process that called the constructor has ended, the reaper kills all programs that this process and its descendants
    have started since that call (``find_marked``). ``close`` kills them earlier. The constructor raises ``SlimeLikeError`` if
    the reaper does not start.
    """

    def __init__(self) -> None:
        self._mark = secrets.token_hex(8)
        command = [sys.executable, "-m", __name__, self._mark]
        environment = os.environ | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}  # Ray changed it
        # The child detaches, then prints its pid; a separate session protects it from signals to the process group.
        self._starter = subprocess.Popen(
            command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True
        )
        self._reaper = psutil.Process(self._started_pid())
        os.environ[process_tree.MARK] = self._mark

    def _started_pid(self) -> int:
        """Return the pid of the detached process. Raises ``SlimeLikeError`` if it does not start."""
        assert self._starter.stdout is not None
        with self._starter.stdout as output:
            if not wait([output.fileno()], START_S * scale()):
                self._starter.kill()
                self._starter.wait(EXIT_S * scale())
                raise DeadlineExceeded(
                    f"the process that kills user code's children did not start in {START_S * scale():.0f} s"
                )
            pid = output.readline()
        code = self._starter.wait(EXIT_S * scale())
        if not pid:
            raise ProcessLost(
                f"the process that kills user code's children {describe_exit(code)} at its start, see the log"
            )
        return int(pid)

    def close(self) -> None:
        """Kill all marked descendants and end the reaper process."""
        process_tree.kill(process_tree.find_marked(self._mark))
        assert self._starter.stdin is not None
        self._starter.stdin.close()
        with suppress(psutil.Error):
            self._reaper.wait(EXIT_S * scale())


def reaper() -> Reaper | None:
    """Return a reaper; None if a supervisor has marked this process and will kill its descendants."""
    return None if process_tree.MARK in os.environ else Reaper()


def main(mark: str) -> None:
    """Detach, print the pid, wait for EOF on stdin, then kill every process with ``mark``."""
    if pid := os.fork():
        os.write(1, f"{pid}\n".encode())
        os._exit(0)
    os.dup2(2, 1)
    while os.read(0, 1):
        pass
    while processes := process_tree.find_marked(mark):  # starting processes may appear later
        process_tree.kill(processes)
        psutil.wait_procs(processes, timeout=process_tree.WAIT_S)


if __name__ == "__main__":
    main(sys.argv[1])
