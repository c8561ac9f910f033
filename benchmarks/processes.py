"""Child processes of a benchmark, each with a time limit."""

from __future__ import annotations

import queue
import shlex
import subprocess
import threading
import time
from collections.abc import Generator
from typing import TYPE_CHECKING

from slime_like.util.deadline import Deadline

if TYPE_CHECKING:
    from torch.multiprocessing import ProcessContext

RUN_S, STOP_S = 7_200.0, 60.0  # limits of one run, and of its end after a signal


def read_lines(process: subprocess.Popen[str], *, limit_s: float = RUN_S, stop_s: float = STOP_S) -> Generator[str]:
    """Yield the lines of standard output until it is closed, then wait for the process.

    Raises ``SystemExit`` if the process does not end within ``limit_s``. In this case, and if the caller stops reading, the
    process is stopped.
    """
    deadline = time.monotonic() + limit_s
    lines: queue.Queue[str | None] = queue.Queue()

    def enqueue_lines() -> None:
        assert process.stdout is not None
        for line in process.stdout:
            lines.put(line)
        lines.put(None)

    threading.Thread(target=enqueue_lines, daemon=True).start()
    try:
        while (line := lines.get(timeout=max(0.0, deadline - time.monotonic()))) is not None:
            yield line
        process.wait(max(0.0, deadline - time.monotonic()))
    except (queue.Empty, subprocess.TimeoutExpired):
        raise SystemExit(f"{command_text(process)} did not end within {limit_s:g} s") from None
    finally:
        stop(process, stop_s)


def stop(process: subprocess.Popen[str] | subprocess.Popen[bytes], seconds: float = STOP_S) -> None:
    """Send SIGTERM to a process that is running, and kill it if it has not ended after ``seconds``."""
    if process.poll() is not None:
        return
    process.terminate()
    try:
        process.wait(seconds)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait(STOP_S)


def join_ranks(ranks: ProcessContext | None, *, limit_s: float = RUN_S) -> None:
    """Wait for the ranks of ``start_processes(..., join=False)`` to end. No rank runs afterwards.

    Raises ``DeadlineExceeded`` after ``limit_s``, and the error of a failed rank.
    """
    assert ranks is not None, "start_processes returns ranks with join=False"
    deadline = Deadline("benchmark", "run", limit_s)
    try:
        while not ranks.join(deadline.remaining("its ranks")):
            pass
    finally:
        for process in ranks.processes:
            if process.is_alive():
                process.kill()
            process.join(STOP_S)


def command_text(process: subprocess.Popen[str] | subprocess.Popen[bytes]) -> str:
    """Return the first words of the command of ``process``, for messages."""
    words = process.args if isinstance(process.args, (list, tuple)) else [process.args]
    return f"{shlex.join(str(word) for word in words[:3])} ..."
