"""One worker process as its parent sees it: started light, asked under a deadline, killed when it does not answer."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from typing import cast

from slime_like.reward.worker import OUT_OF_MEMORY, Load, ScoreReply, ScoreRequest
from slime_like.util.deadline import Deadline

EXIT_S = 5.0


class WorkerDied(Exception):
    """The process ended in the middle of a call; ``killed``: not by itself. Never leaves this package."""

    def __init__(self, message: str, *, killed: bool) -> None:
        super().__init__(message)
        self.killed = killed


class WorkerProcess:
    """A child that runs ``slime_like.reward.worker``.

    A plain child with one pipe instead of multiprocessing's spawn: the main module of the parent (a Ray worker, a test
    runner) is not imported again in it. It leads a process group of its own, so that a kill takes what a reward
    started along, and Ctrl-C reaches only the driver.
    """

    def __init__(self, call_seconds: float, memory_bytes: int) -> None:
        """``memory_bytes`` is what the kernel lets the process have; 0: no limit."""
        self.loaded: dict[str, bool] = {}  # reward -> whether it takes groups
        ours, theirs = Pipe()
        self._pipe = cast(Connection, ours)
        fd = theirs.fileno()
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
        theirs.close()

    @property
    def pid(self) -> int:
        """Process id."""
        return self._process.pid

    @property
    def alive(self) -> bool:
        """Whether the process runs."""
        return self._process.poll() is None

    async def ask(self, request: Load | ScoreRequest, deadline: Deadline) -> ScoreReply:
        """The worker's answer. Raises ``DeadlineExceeded``, or ``WorkerDied`` with the exit code."""
        loop = asyncio.get_running_loop()
        readable: asyncio.Future[None] = loop.create_future()
        fd = self._pipe.fileno()
        waits_for = f"reward {request.name!r} (process {self.pid})"
        loop.add_reader(fd, lambda: readable.done() or readable.set_result(None))
        try:
            self._pipe.send(request)
            await asyncio.wait_for(readable, deadline.remaining(waits_for))
            return self._pipe.recv()
        except TimeoutError as error:
            raise deadline.exceeded(waits_for) from error
        except (EOFError, ConnectionError) as error:
            self.kill()
            raise self._death() from error
        finally:
            loop.remove_reader(fd)

    def _death(self) -> WorkerDied:
        """How the process ended, once it has."""
        code = self._process.returncode
        if code == OUT_OF_MEMORY:
            return WorkerDied("ran out of memory", killed=True)
        if code < 0:
            return WorkerDied(f"was killed by {signal.Signals(-code).name}", killed=True)
        return WorkerDied(f"its process ended with exit code {code}", killed=False)

    def kill(self) -> None:
        """End the process and all that it started, now."""
        self._pipe.close()
        if self._process.poll() is None:
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait(EXIT_S)

    def close(self) -> None:
        """Let an idle process end by itself; kill it when it does not."""
        self._pipe.close()
        try:
            self._process.wait(EXIT_S)
        except subprocess.TimeoutExpired:
            self.kill()
