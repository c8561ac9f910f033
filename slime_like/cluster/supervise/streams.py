"""stdout and stderr that tolerate a closed pipe, a closed terminal and a full disk."""

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


def tolerate_write_errors() -> None:
    """Wrap stdout and stderr in a ``_TolerantFile`` unless the program has replaced them. Open /dev/null for closed streams."""
    _open_closed_streams()
    if sys.stdout is sys.__stdout__ and sys.stdout is not None:
        sys.stdout = _tolerant(sys.stdout)
    if sys.stderr is sys.__stderr__ and sys.stderr is not None:
        sys.stderr = _tolerant(sys.stderr)


def _open_closed_streams() -> None:
    """Open /dev/null in place of each standard stream that the caller of the program has closed, such as stdout by ``>&-``.

    Otherwise the next file or socket would get the stream's file descriptor, and children would print into it.
    """
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        if getattr(sys, name) is None:
            null = os.open(os.devnull, os.O_RDWR)
            if null != number:
                os.dup2(null, number)
                os.close(null)
            os.set_inheritable(number, True)
            setattr(sys, name, os.fdopen(number, "w" if number else "r", closefd=False))


def _tolerant(stream: TextIO) -> TextIO:
    stream.flush()
    raw = io.BufferedWriter(_TolerantFile(stream.fileno(), "w", closefd=False))
    buffered = stream.fileno() == 1 and not stream.isatty()
    return io.TextIOWrapper(raw, stream.encoding, stream.errors, line_buffering=not buffered)


class _TolerantFile(io.FileIO):
    """Stream that drops output if its reader is gone or the disk is full. For stdout, it warns once on stderr."""

    _warned = False

    def write(self, data: Buffer, /) -> int:
        try:
            return super().write(data) or 0
        except OSError as error:
            if error.errno not in (*GONE, *FULL):
                raise
            self._warn(error)
            if error.errno in GONE:  # so that writes by libraries and children do not fail either
                null = os.open(os.devnull, os.O_WRONLY)
                os.dup2(null, self.fileno())
                os.close(null)
            return memoryview(data).nbytes

    def _warn(self, error: OSError) -> None:
        if self._warned or self.fileno() != 1:
            return
        self._warned = True
        with suppress(OSError):
            os.write(2, f"warning: standard output: {error.strerror}; the run continues, see its run.dir\n".encode())
