"""Standard output and standard error that may go away: a pipe whose reader has ended, a terminal that was closed, a full disk."""

from __future__ import annotations

import errno
import io
import os
import sys
from collections.abc import Buffer
from contextlib import suppress
from typing import TextIO

GONE = (errno.EPIPE, errno.EIO, errno.EBADF)
FULL = (errno.ENOSPC, errno.EFBIG, errno.EDQUOT)


def keep_streams() -> None:
    """Let the process outlive its streams. Leaves alone what a program has put in their place."""
    if sys.stdout is sys.__stdout__ and sys.stdout is not None:
        sys.stdout = _lasting(sys.stdout)
    if sys.stderr is sys.__stderr__ and sys.stderr is not None:
        sys.stderr = _lasting(sys.stderr)


def _lasting(stream: TextIO) -> TextIO:
    stream.flush()
    raw = io.BufferedWriter(_Lasting(stream.fileno(), "w", closefd=False))
    buffered = stream.fileno() == 1 and not stream.isatty()
    return io.TextIOWrapper(raw, stream.encoding, stream.errors, line_buffering=not buffered)


class _Lasting(io.FileIO):
    """Drops what nobody can read any more, and says so once on the other stream."""

    _told = False

    def write(self, data: Buffer, /) -> int:
        try:
            return super().write(data) or 0
        except OSError as error:
            if error.errno not in (*GONE, *FULL):
                raise
            self._tell(error)
            if error.errno in GONE:  # for the writes of libraries and children
                null = os.open(os.devnull, os.O_WRONLY)
                os.dup2(null, self.fileno())
                os.close(null)
            return memoryview(data).nbytes

    def _tell(self, error: OSError) -> None:
        if self._told or self.fileno() != 1:
            return
        self._told = True
        with suppress(OSError):
            os.write(2, f"warning: standard output: {error.strerror}; the run goes on, see its run.dir\n".encode())
