"""Child process that runs a command while this process waits, and that ends if this process ends.

The child has its own session, so that Ctrl-C on a terminal reaches it only through this process, which sends it two signals.
The command is the quickstart's warm start, a run of ``train.py``. After one signal, ``train.py`` would finish its rollout and
save a checkpoint; after two, it stops immediately and without one (``slime_like/cluster/run/stop.py``). An unfinished warm
start is useless.
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
END_S = 60.0  # time limit for a run to stop its processes
# Two different signals, because pending signals of one kind merge. SIGTERM also ends a run that has no handlers yet.
SIGNALS = (signal.SIGTERM, signal.SIGINT)
BOUND = Path(__file__).with_name("bound.py")


def run_child(name: str, command: Sequence[str], deadline: Deadline) -> int:
    """Run ``command`` and return its exit code; messages call it ``name``.

    Raises ``KeyboardInterrupt`` on Ctrl-C or SIGTERM (in the main thread only), and ``DeadlineExceeded`` if ``deadline``
    passes, both once the child has ended. If this process is killed, the child is killed too.
    """
    signals: list[str] = []
    with _record_signals(name, signals):
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
        raise KeyboardInterrupt(f"{name} was stopped by {signals[0]}; the same command starts it again")
    return process.returncode


@contextmanager
def _record_signals(name: str, signals: list[str]) -> Generator[None]:
    """Handle SIGINT and SIGTERM in the block: append their names to ``signals``, and print that ``name`` is being stopped.

    Outside the main thread, do nothing, since only the main thread can set handlers.
    """

    def record(number: int, frame: FrameType | None) -> None:
        del frame
        signals.append(signal.Signals(number).name)
        os.write(2, f"\nstopping {name}\n".encode())

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    old_handlers = {number: signal.signal(number, record) for number in SIGNALS}
    try:
        yield
    finally:
        for number, handler in old_handlers.items():
            signal.signal(number, handler)


def _end(process: subprocess.Popen[bytes]) -> None:
    """Send ``SIGNALS`` to a running child, wait up to ``END_S`` for its end, then kill its process group and reap the child."""
    if process.poll() is None:
        for number in SIGNALS:
            process.send_signal(number)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(Deadline("driver", "end of a child", END_S).limit)
    with contextlib.suppress(ProcessLookupError):  # the group has ended
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
