"""Kill processes started by user code if no supervisor adopts them: in a joined Ray cluster, or if the driver has none.

``python -m slime_like.cluster.supervise.reaper MARK OWNER`` detaches from its parent, because Ray kills the parent's direct
children along with it. Once process ``OWNER`` has ended or closed its pipe, it kills every program with ``MARK`` in its
environment, and every forked process: the kernel shows no mark for a fork, which therefore sends its pid through the pipe.
"""

from __future__ import annotations

import os
import secrets
import struct
import subprocess
import sys
from collections import defaultdict
from contextlib import suppress
from multiprocessing.connection import wait

import psutil

from slime_like.cluster.supervise import process_tree
from slime_like.errors import DeadlineExceeded, ProcessLost
from slime_like.rollout.engine.processes import describe_exit
from slime_like.util.deadline import scale

START_S = 60.0
EXIT_S = 5.0
REPORT_S = 0.5  # from the start of a forked process to its report in the pipe
CLOSE = 0  # in the pipe, in place of the pid of a forked process; EOF has to wait for forked processes to end
NUMBER = struct.Struct("i")
READ_BYTES = 1024 * NUMBER.size


class Reaper:
    """Handle of a reaper process, which the constructor starts.

    Once the process that called the constructor has ended, the reaper kills all processes that this process and its descendants
    have started since that call: programs (``find_marked``), and forks by ``os.fork``, which multiprocessing uses too.
    ``close`` kills them earlier. The constructor raises ``SlimeLikeError`` if the reaper does not start.
    """

    def __init__(self) -> None:
        self._mark = secrets.token_hex(8)
        command = [sys.executable, "-m", __name__, self._mark, str(os.getpid())]
        environment = os.environ | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}  # Ray changed it
        # The child detaches, then prints its pid; a separate session protects it from signals to the process group.
        self._starter = subprocess.Popen(
            command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True
        )
        self._reaper = psutil.Process(self._started_pid())
        assert self._starter.stdin is not None
        self._pipe = self._starter.stdin.fileno()
        self._pipe_id = _file_id(self._pipe)
        os.register_at_fork(after_in_child=self._report_fork)
        os.environ[process_tree.MARK] = self._mark

    def _report_fork(self) -> None:
        """Send the pid of this process to the reaper, unless the pipe was closed or its descriptor used for another file."""
        with suppress(OSError):
            if _file_id(self._pipe) == self._pipe_id:
                # In a new pid namespace, getpid returns another number than the one by which the reaper knows this process.
                os.write(self._pipe, NUMBER.pack(int(os.readlink("/proc/self"))))

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
        """Kill all processes that the reaper would kill, and end the reaper process."""
        process_tree.kill(process_tree.find_marked(self._mark))
        assert self._starter.stdin is not None
        with suppress(OSError):  # the reaper was killed
            os.write(self._pipe, NUMBER.pack(CLOSE))
        self._starter.stdin.close()
        with suppress(psutil.Error):
            self._reaper.wait(EXIT_S * scale())


def reaper() -> Reaper | None:
    """Return a reaper; None if a supervisor has marked this process and will kill its descendants."""
    return None if process_tree.MARK in os.environ else Reaper()


def main(mark: str, owner: int) -> None:
    """Detach, print the pid, wait until the process ``owner`` ends or closes its pipe, then kill what it has started."""
    end = os.pidfd_open(owner)
    if pid := os.fork():
        os.write(1, f"{pid}\n".encode())
        os._exit(0)
    os.dup2(2, 1)
    forks: set[psutil.Process] = set()
    while 0 in wait([0, end]):
        numbers = _read_forks(forks)
        if not numbers or CLOSE in numbers:
            break
    _kill_all(mark, forks)


def _kill_all(mark: str, forks: set[psutil.Process]) -> None:
    """Kill programs with ``mark``, ``forks``, and processes that these start or fork meanwhile."""
    is_open = True
    while True:
        if is_open and wait([0], 0):
            is_open = bool(_read_forks(forks))
        if processes := _living(mark, forks):
            process_tree.kill(processes)
            psutil.wait_procs(processes, timeout=process_tree.WAIT_S)
        elif not (is_open and wait([0], REPORT_S * scale())):  # a living fork that was not reported keeps the pipe open
            return


def _read_forks(forks: set[psutil.Process]) -> set[int]:
    """Read numbers from the pipe on stdin, add the forked processes that they name to ``forks``, and return the numbers.

    At EOF, no numbers are returned.
    """
    data = os.read(0, READ_BYTES)
    numbers = {number for (number,) in NUMBER.iter_unpack(data)}
    forks -= {process for process in forks if not process.is_running()}
    for pid in numbers - {CLOSE}:
        with suppress(psutil.Error):  # it has ended
            process = psutil.Process(pid)
            if process.create_time() >= psutil.Process().create_time():  # otherwise the pid is of another namespace
                forks.add(process)
    return numbers


def _living(mark: str, forks: set[psutil.Process]) -> list[psutil.Process]:
    """Return the living processes among programs with ``mark``, ``forks`` and the descendants of both."""
    children: dict[int, list[psutil.Process]] = defaultdict(list)
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            children[process.ppid()].append(process)
    processes: set[psutil.Process] = set()
    unvisited = [*process_tree.find_marked(mark), *forks]
    while unvisited:
        if (process := unvisited.pop()) not in processes:
            processes.add(process)
            unvisited += children[process.pid]
    return [process for process in processes if _is_living(process)]


def _is_living(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.Error:
        return False


def _file_id(descriptor: int) -> tuple[int, int]:
    """Return device and inode of an open file. Raises ``OSError`` if there is none."""
    status = os.fstat(descriptor)
    return status.st_dev, status.st_ino


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
