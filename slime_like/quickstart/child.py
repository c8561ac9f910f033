"""A run as a child of this process: it ends with this process, which waits for its end.

The child has its own session, so that Ctrl-C on a terminal reaches it once, through this process. A half-finished result
is useless, so the child is stopped immediately instead of after its step, which for ``train.py`` takes two signals
(``slime_like/cluster/run/stop.py``).
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
END_S = 60.0  # for a run to stop its processes
# Two kinds, since pending signals of one kind merge. Before a run has handlers (and processes) the first one ends it.
SIGNALS = (signal.SIGTERM, signal.SIGINT)
BOUND = Path(__file__).with_name("bound.py")


def run_child(name: str, command: Sequence[str], deadline: Deadline) -> int:
    """Run ``command``, called ``name`` in messages; return its exit code.

    Raises ``KeyboardInterrupt`` after Ctrl-C or SIGTERM, ``DeadlineExceeded`` when ``deadline`` passes; in both cases all
    its processes have ended. If this process is killed, so is the child.
    """
    signals: list[str] = []
    with _handled(name, signals):
        process = subprocess.Popen(
            [sys.executable, "-P", str(BOUND), str(os.getpid()), *command],
            stdin=subprocess.DEVNULL,
            start_new_session=True,
        )
        try:
            while process.poll() is None and not signals:
                time.sleep(min(POLL_S, deadline.remaining(name)))
        finally:
            _end(process)
    if signals:
        raise KeyboardInterrupt(f"{name} was stopped by {signals[0]}; the same command begins it anew")
    return process.returncode


@contextmanager
def _handled(name: str, signals: list[str]) -> Generator[None]:
    """Append names of Ctrl-C and SIGTERM signals to ``signals``; does nothing in threads other than the main one."""

    def note(number: int, frame: FrameType | None) -> None:
        del frame
        signals.append(signal.Signals(number).name)
        os.write(2, f"\nstopping {name}: a moment\n".encode())

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    old_handlers = {number: signal.signal(number, note) for number in SIGNALS}
    try:
        yield
    finally:
        for number, handler in old_handlers.items():
            signal.signal(number, handler)


def _end(process: subprocess.Popen[bytes]) -> None:
    """End a running child: by signals, or by killing its group if that takes too long."""
    if process.poll() is None:
        for number in SIGNALS:
            process.send_signal(number)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(Deadline("driver", "end of a child", END_S).limit)
    with contextlib.suppress(ProcessLookupError):  # the group has ended
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
