"""Output of user code: passed on to the process's own log, and its end kept for the message of an error."""

from __future__ import annotations

import io
import sys
from collections.abc import Generator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TextIO

MAX_KEPT = 2000  # characters of the end of an output


class Recording:
    """The end of the text that one piece of user code has printed."""

    def __init__(self) -> None:
        self._text = ""

    def add(self, text: str) -> None:
        """Append ``text``, of which the end is kept."""
        self._text = (self._text + text)[-MAX_KEPT:]

    def clause(self) -> str:
        """Return the output as part of a message; empty when nothing was printed."""
        return f"; it printed {self._text.strip()!r}" if self._text.strip() else ""


_current: ContextVar[Recording | None] = ContextVar("_current", default=None)


class _Tee(io.TextIOBase):
    """A stream that passes everything on, and records it for the task or thread that prints."""

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
    """Put recording streams in the place of this process's ``sys.stdout`` and ``sys.stderr``. Idempotent."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if not isinstance(stream, _Tee):
            setattr(sys, name, _Tee(stream))


@contextmanager
def recorded() -> Generator[Recording]:
    """Record what is printed inside, by the tasks that begin inside as well, once ``record_streams`` was called."""
    recording = Recording()
    token = _current.set(recording)
    try:
        yield recording
    finally:
        _current.reset(token)
