"""A file of lines that a run appends to, whatever becomes of its disk or its name meanwhile."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from slime_like.printable import visible


class Appended:
    """Lines reach the disk one by one; those that it refuses are kept, and written when it takes them.

    A file that is removed or replaced meanwhile is made again with all its lines: the open file still holds them. Both are said
    on stderr, once until it is well again.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._fd = self._open(path)
        self._left = b""  # what the disk has refused
        self._lines = 0  # of these

    def write(self, line: str) -> None:
        """Append ``line``, after those that are left over."""
        self._left += line.encode()
        self._lines += 1
        try:
            if not self._is_named():
                self._make_again()
            while self._left:
                self._left = self._left[os.write(self._fd, self._left) :]
            self._lines = 0
        except OSError as error:
            if self._lines == 1:
                _say(
                    f"{self._path}: {error.strerror}; its lines are kept until the disk takes them, and training goes on"
                )

    def close(self) -> None:
        """Close the file; say what never reached it."""
        if self._lines:
            _say(f"{self._path}: the disk has not taken its last {self._lines} lines: they are lost")
        os.close(self._fd)

    @staticmethod
    def _open(path: Path) -> int:
        return os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o666)

    def _is_named(self) -> bool:
        try:
            return os.path.samestat(os.stat(self._path), os.fstat(self._fd))
        except FileNotFoundError:
            return False

    def _make_again(self) -> None:
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
