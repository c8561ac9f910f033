"""Recording of the output of user code, so that error messages can quote its end. The output still goes to the process's log."""

from __future__ import annotations

import io
import sys
from collections.abc import Generator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TextIO

MAX_TAIL = 2000  # characters


class Recording:
    """End of the text that user code has printed, at most ``MAX_TAIL`` characters."""

    def __init__(self) -> None:
        self._text = ""

    def add(self, text: str) -> None:
        """Append ``text``; only the tail is kept."""
        self._text = (self._text + text)[-MAX_TAIL:]

    def clause(self) -> str:
        """Return a clause for an error message that quotes the output; empty if there is no output."""
        return f"; it printed {self._text.strip()!r}" if self._text.strip() else ""


_current: ContextVar[Recording | None] = ContextVar("_current", default=None)


class _Tee(io.TextIOBase):
    """Stream that forwards text and adds it to the recording of the task or thread that prints it."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        if (recording := _current.get()) is not None:
            recording.add(text)
        return self._stream.write(text)

    def flush(self) -> None:
        self._stream.flush()

    def fileno(self) -> int:
        return self._stream.fileno()

    @property
    def encoding(self) -> str:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self._stream.encoding


def record_streams() -> None:
    """Replace this process's ``sys.stdout`` and ``sys.stderr`` with recording streams. Idempotent."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if not isinstance(stream, _Tee):
            setattr(sys, name, _Tee(stream))


@contextmanager
def record_output() -> Generator[Recording]:
    """Record output printed in the block and in tasks started in it. Call ``record_streams`` before."""
    recording = Recording()
    token = _current.set(recording)
    try:
        yield recording
    finally:
        _current.reset(token)
