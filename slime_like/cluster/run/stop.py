"""Ctrl-C, SIGTERM and SIGHUP, from the first rollout to the last process that is taken down."""

from __future__ import annotations

import os
import signal
from contextlib import suppress
from types import FrameType
from typing import Any

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class StopRequest:
    """The first signal asks the loop to end after the rollout it is in, the second ends it at once, a third changes
    nothing: it must not cut short the taking down of what the run has started.
    """

    def __init__(self) -> None:
        self.requested = False
        self._closing = False
        self._before: Any = None

    def install(self) -> None:
        """Take over the signals of the main thread."""
        taken = [number for number in SIGNALS if signal.getsignal(number) is not signal.SIG_IGN]  # nohup ignores SIGHUP
        self._before = {number: signal.signal(number, self._on_signal) for number in taken}

    def hold(self) -> None:
        """From now on the run is being taken down."""
        self._closing = True

    def restore(self) -> None:
        """Give the signals back."""
        for number, handler in (self._before or {}).items():
            signal.signal(number, handler)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        del frame
        if self._closing:
            _say(b"\nstopping the processes of this run: a moment\n")
        elif self.requested:
            # The exception is on its way to what takes the run down; Ray's waits drop what it says.
            self._closing = True
            _say(f"\nsecond {signal.Signals(number).name}: stopping at once, without a checkpoint\n".encode())
            raise KeyboardInterrupt("stopped")
        else:
            self.requested = True
            _say(b"\nstopping after this rollout, with a checkpoint; once more to stop at once\n")


def _say(text: bytes) -> None:
    with suppress(OSError):  # the terminal is gone: its end may be what the signal tells
        os.write(2, text)
