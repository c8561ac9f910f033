"""Handling of Ctrl-C, SIGTERM and SIGHUP during a run and its teardown."""

from __future__ import annotations

import os
import signal
from contextlib import suppress
from types import FrameType
from typing import Any

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class StopRequest:
    """Handler of stop signals. The first signal ends the loop after the current rollout, the second one immediately.

    Further signals, and all signals during the teardown, are ignored, so that they cannot interrupt the teardown.
    """

    def __init__(self) -> None:
        self.requested = False
        self._closing = False
        self._previous_handlers: Any = None

    def install(self) -> None:
        """Install the signal handlers, except for signals that are already ignored. Call it from the main thread."""
        # An ignored signal stays ignored, such as SIGHUP under nohup.
        handled_signals = [number for number in SIGNALS if signal.getsignal(number) is not signal.SIG_IGN]
        self._previous_handlers = {number: signal.signal(number, self._on_signal) for number in handled_signals}

    def ignore_signals(self) -> None:
        """Ignore signals from now on: the run is being torn down."""
        self._closing = True

    def restore(self) -> None:
        """Restore the previous signal handlers."""
        for number, handler in (self._previous_handlers or {}).items():
            signal.signal(number, handler)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        del frame
        if self._closing:
            _say(b"\nstopping the processes of this run, please wait\n")
        elif self.requested:
            # The exception propagates to the teardown. It loses its message if it interrupts a wait in Ray.
            self._closing = True
            _say(f"\nsecond {signal.Signals(number).name}: stopping immediately, without a checkpoint\n".encode())
            raise KeyboardInterrupt("stopped")
        else:
            self.requested = True
            _say(b"\nstopping after this rollout, with a checkpoint; repeat the signal to stop immediately\n")


def _say(text: bytes) -> None:
    with suppress(OSError):  # the terminal is gone, which may be the reason for the signal
        os.write(2, text)
