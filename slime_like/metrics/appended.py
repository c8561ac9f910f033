"""An append-only file of lines that survives a full disk and removal of the file."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from slime_like.printable import visible


class Appended:
    """A log that writes line by line; lines are buffered while the disk refuses writes.

    A file that was removed or replaced is restored with all its lines from the open descriptor. Each problem is reported
    on stderr once until it is resolved.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._fd = self._open(path)
        self._pending = b""  # not yet accepted by the disk
        self._num_pending = 0  # lines

    def write(self, line: str) -> None:
        """Append ``line`` after any pending lines."""
        self._pending += line.encode()
        self._num_pending += 1
        try:
            if not self._is_named():
                self._restore()
            while self._pending:
                self._pending = self._pending[os.write(self._fd, self._pending) :]
            self._num_pending = 0
        except OSError as error:
            if self._num_pending == 1:
                _say(
                    f"{self._path}: {error.strerror}; its lines are kept until the disk takes them, and training continues"
                )

    def close(self) -> None:
        """Close the file; warn if pending lines are lost."""
        if self._num_pending:
            _say(f"{self._path}: the disk has not taken its last {self._num_pending} lines: they are lost")
        os.close(self._fd)

    @staticmethod
    def _open(path: Path) -> int:
        return os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o666)

    def _is_named(self) -> bool:
        try:
            return os.path.samestat(os.stat(self._path), os.fstat(self._fd))
        except FileNotFoundError:
            return False

    def _restore(self) -> None:
        self._path.parent.mkdir(parents=True, exist_ok=True)
        partial = self._path.with_suffix(".partial")
        with os.fdopen(os.dup(self._fd), "rb") as removed:
            removed.seek(0)
            partial.write_bytes(removed.read())
        partial.replace(self._path)
        os.close(self._fd)
        self._fd = self._open(self._path)
        _say(f"{self._path} was removed or replaced while the run went on: it is made again, with all its lines")


def _say(text: str) -> None:
    sys.stderr.write(visible(f"warning: {text}\n"))
