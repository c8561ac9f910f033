"""Append-only file of lines that tolerates a full disk and the removal of the file."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from slime_like.checkpoint.files import replacing
from slime_like.printable import visible
from slime_like.util.counted import counted


class AppendOnlyFile:
    """Log that writes line by line. Lines stay in memory while they cannot be written, as on a full disk.

    If the file was removed or replaced, the next write restores it with all its lines, which are still readable through the
    open descriptor; a file that replaced it is overwritten. A warning on stderr reports each such restoration, and the
    beginning of each period in which lines cannot be written.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._fd = self._open(path)
        self._pending_lines = b""  # lines that could not be written yet

    def write(self, line: str) -> None:
        """Append ``line``, which must end with a newline, after any pending lines."""
        had_pending_lines = bool(self._pending_lines)
        self._pending_lines += line.encode()
        try:
            if not self._is_at_path():
                self._restore()
            while self._pending_lines:
                self._pending_lines = self._pending_lines[os.write(self._fd, self._pending_lines) :]
        except OSError as error:
            if not had_pending_lines:
                _say(
                    f"{self._path}: {error.strerror}; its new lines stay in memory until they can be written, and training continues"
                )

    def close(self) -> None:
        """Close the file; warn if pending lines are lost."""
        if num_pending := self._pending_lines.count(b"\n"):
            _say(f"{self._path}: its end is missing: {counted(num_pending, 'line')} could not be written")
        os.close(self._fd)

    @staticmethod
    def _open(path: Path) -> int:
        return os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o666)

    def _is_at_path(self) -> bool:
        """Return whether the open file is still the file at the path."""
        try:
            return os.path.samestat(os.stat(self._path), os.fstat(self._fd))
        except FileNotFoundError:
            return False

    def _restore(self) -> None:
        """Copy the lines of the open file to the path, and reopen it there."""
        with os.fdopen(os.dup(self._fd), "rb") as file, replacing(self._path) as scratch:
            file.seek(0)
            scratch.write_bytes(file.read())
        old_fd, self._fd = self._fd, self._open(self._path)
        os.close(old_fd)
        _say(f"{self._path} was removed or replaced during the run: it was written again, with all its lines")


def _say(text: str) -> None:
    sys.stderr.write(visible(f"warning: {text}\n"))
