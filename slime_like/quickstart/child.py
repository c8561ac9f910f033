"""A run as a child of this process: it ends when this process is to end, and its end is waited for.

The child has a session of its own, so that Ctrl-C on a terminal reaches it once and from here, whatever the terminal's
process group is. What it was asked to make is of no use half made: it is not asked to end after its step, but at once,
which for ``train.py`` takes two signals (``slime_like/cluster/run/stop.py``).
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

from slime_like.util.deadline import Deadline

POLL_S = 0.05
END_S = 60.0  # to take down what a run has started
# Both at once: pending signals of one kind are one. Before a run has handlers, and anything to take down, the first ends it.
SIGNALS = (signal.SIGTERM, signal.SIGINT)
BOUND = Path(__file__).with_name("bound.py")


def run_child(what: str, command: Sequence[str], deadline: Deadline) -> int:
    """Run ``command``, which is ``what`` in messages; its exit code.

    Raises ``KeyboardInterrupt`` when Ctrl-C or SIGTERM has ended it, ``DeadlineExceeded`` when ``deadline`` passes; either
    way nothing is left of it then. If this process is killed, so is the child.
    """
    asked: list[str] = []
    with _handled(what, asked):
        process = subprocess.Popen(
            [sys.executable, "-P", str(BOUND), str(os.getpid()), *command],
            stdin=subprocess.DEVNULL,
            start_new_session=True,
        )
        try:
            while process.poll() is None and not asked:
                time.sleep(min(POLL_S, deadline.remaining(what)))
        finally:
            _end(process)
    if asked:
        raise KeyboardInterrupt(f"{what} was stopped by {asked[0]}; the same command begins it anew")
    return process.returncode


@contextmanager
def _handled(what: str, asked: list[str]) -> Generator[None]:
    """Ctrl-C and SIGTERM are noted in ``asked``; a thread other than the main one gets none, and leaves them alone."""

    def note(number: int, frame: FrameType | None) -> None:
        del frame
        asked.append(signal.Signals(number).name)
        os.write(2, f"\nstopping {what}: a moment\n".encode())

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.signal(number, note) for number in SIGNALS}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _end(process: subprocess.Popen[bytes]) -> None:
    """End a run that goes on: as it ends itself when it is asked to, or with its group when that takes too long."""
    if process.poll() is None:
        for number in SIGNALS:
            process.send_signal(number)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(Deadline("driver", "end of a child", END_S).limit)
    with contextlib.suppress(ProcessLookupError):  # all of it is gone
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
