"""Parent's side of a worker process of the reward pool. Requests have a deadline, after which the pool kills the process."""

from __future__ import annotations

import asyncio
import os
import signal
import struct
import subprocess
import sys
import threading
from contextlib import suppress
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from socket import SO_RCVTIMEO, SO_SNDTIMEO, SOL_SOCKET, socket
from typing import cast

from slime_like.reward.worker import OUT_OF_MEMORY, Load, ScoreReply, ScoreRequest
from slime_like.util.deadline import Deadline, scale

EXIT_S = 5.0
PIPE_S = 5.0  # limit of a write or read without progress: a suspended process does not read a long request


class WorkerDied(Exception):
    """Error of a process that ended, or closed its pipe, during a call. Internal to this package.

    ``killed`` is True if a signal or the memory limit ended the process, or if it did not end within ``EXIT_S`` of SIGKILL.
    """

    def __init__(self, message: str, *, killed: bool) -> None:
        super().__init__(message)
        self.killed = killed


class WorkerProcess:
    """Child process that runs ``slime_like.reward.worker``.

    It is a plain child with one pipe, because multiprocessing's spawn would import the parent's main module (a Ray worker, a
    test runner) again. It leads its own process group, so that a kill includes processes started by a reward, and Ctrl-C in
    the terminal does not reach it.
    """

    def __init__(self, call_seconds: float, memory_bytes: int) -> None:
        """Start the process.

        The process ends itself if a call takes much longer than ``call_seconds``. ``memory_bytes`` is the memory limit that the
        kernel enforces; 0 means no limit.
        """
        self.loaded: dict[str, bool] = {}  # by reward: True if it takes groups
        self._pipe_lock = (
            threading.Lock()
        )  # held while a thread writes or reads, so that the pipe is not closed under it
        parent_end, child_end = Pipe()
        self._pipe = cast(Connection, parent_end)
        _limit_waits(self._pipe.fileno())
        fd = child_end.fileno()
        environment = os.environ | {
            "PYTHONPATH": os.pathsep.join(p for p in sys.path if p),
            "OMP_NUM_THREADS": "1",
            "PYTHONUNBUFFERED": "1",
        }
        self._process = subprocess.Popen(
            [sys.executable, "-m", "slime_like.reward.worker", str(fd), str(call_seconds), str(memory_bytes)],
            pass_fds=[fd],
            env=environment,
            stdin=subprocess.DEVNULL,
            start_new_session=True,
        )
        child_end.close()

    @property
    def pid(self) -> int:
        """Return the id of the process."""
        return self._process.pid

    @property
    def alive(self) -> bool:
        """Return whether the process is running.

        A process that has ended is not reaped here, so that ``kill`` still reaches its group.
        """
        if self._process.returncode is not None:
            return False
        try:
            return os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None
        except ChildProcessError:
            # It was reaped, because user code ignores SIGCHLD or waits for any child. ``poll`` records that, as ``kill`` must
            # not signal an id that another process may have by now.
            return self._process.poll() is None

    async def call(self, request: Load | ScoreRequest, deadline: Deadline) -> ScoreReply:
        """Send a request and return the reply.

        Raises ``DeadlineExceeded`` if there is no reply in time or a write or read makes no progress for ``PIPE_S``, and
        ``WorkerDied`` with the cause if the process ended or closed its pipe.
        After an error or a cancellation the process cannot be used again: call ``kill``. The pipe is written and read in
        threads, so that the event loop never waits: if the process is suspended (SIGSTOP), a write or read can block for
        ``PIPE_S``.
        """
        subject = f"reward {request.name!r} (process {self.pid})"
        try:
            return await self._exchange(request, deadline, subject)
        except (TimeoutError, BlockingIOError) as error:
            raise deadline.exceeded(subject) from error
        except (EOFError, ConnectionError) as error:
            await asyncio.to_thread(self.kill)
            raise self._death() from error

    async def _exchange(self, request: Load | ScoreRequest, deadline: Deadline, subject: str) -> ScoreReply:
        loop = asyncio.get_running_loop()
        readable: asyncio.Future[None] = loop.create_future()
        fd = self._pipe.fileno()
        await asyncio.to_thread(self._send, request)
        loop.add_reader(fd, lambda: readable.done() or readable.set_result(None))  # wakes the loop until it is removed
        try:
            await asyncio.wait_for(readable, deadline.remaining(subject))
        finally:
            loop.remove_reader(fd)  # before a kill closes the pipe, whose number may then belong to another file
        return await asyncio.to_thread(self._receive)

    def _send(self, request: Load | ScoreRequest) -> None:
        with self._pipe_lock:
            self._pipe.send(request)

    def _receive(self) -> ScoreReply:
        with self._pipe_lock:
            return self._pipe.recv()

    def _death(self) -> WorkerDied:
        """Return an error that describes how the process ended."""
        code = self._process.returncode
        if code is None:
            return WorkerDied(f"closed its pipe and did not end within {EXIT_S:g} s of SIGKILL", killed=True)
        if code == OUT_OF_MEMORY:
            return WorkerDied("ran out of memory", killed=True)
        if code < 0:
            return WorkerDied(f"was killed by {signal.Signals(-code).name}", killed=True)
        return WorkerDied(f"its process ended with exit code {code}", killed=False)

    def kill(self) -> None:
        """Kill the process group, block up to ``EXIT_S`` until the process has ended, and close the pipe. Idempotent."""
        if (
            self._process.returncode is None
        ):  # until it is reaped, even a process that has ended keeps its id, which is that of its group
            with suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
        with suppress(subprocess.TimeoutExpired):  # a process in a driver call or disk access ends only after it
            self._process.wait(EXIT_S * scale())
        with self._pipe_lock:
            self._pipe.close()

    def close(self) -> None:
        """Close the pipe, so that an idle process exits; kill the process if it does not exit within ``EXIT_S``."""
        with self._pipe_lock:
            self._pipe.close()
        try:
            self._process.wait(EXIT_S * scale())
        except subprocess.TimeoutExpired:
            self.kill()


def _limit_waits(fd: int) -> None:
    """Set the timeouts of a pipe created by ``Pipe()``, which is a socket.

    A write or read that makes no progress for ``PIPE_S`` then raises ``BlockingIOError``.
    """
    seconds, fraction = divmod(PIPE_S * scale(), 1.0)
    with socket(fileno=os.dup(fd)) as end:  # the copy has the same options
        for option in (SO_SNDTIMEO, SO_RCVTIMEO):
            end.setsockopt(SOL_SOCKET, option, struct.pack("ll", int(seconds), int(fraction * 1e6)))
