"""A disk that counts what is done to a folder, and dies or is full before a chosen operation.

What the folder holds then is what a process killed there would have left: nothing is changed any more, also not by
whoever cleans up. Python's audit events tell every opening for writing, renaming and removing, in whatever library;
``fsync``, which has none, is wrapped.
"""

from __future__ import annotations

import contextlib
import errno
import os
import sys
from collections.abc import Generator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

CHANGES = ("os.rename", "os.remove", "os.mkdir", "os.rmdir", "os.truncate", "os.link", "os.symlink", "shutil.rmtree")
WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC


class Killed(BaseException):
    """The process would be gone."""


@dataclass(frozen=True, slots=True)
class Operation:
    """One change, as it is about to be made."""

    event: str
    path: str
    to: str = ""


class Disk:
    """One per process: audit hooks cannot be removed."""

    def __init__(self) -> None:
        self.operations: list[Operation] = []
        self._folder: str | None = None
        self._dies_before: int | None = None
        self._full_at: str | None = None
        self._fsync = os.fsync
        sys.addaudithook(self._hear)

    @contextlib.contextmanager
    def watching(
        self, folder: Path, *, dies_before: int | None = None, full_at: str | None = None
    ) -> Generator[list[Operation]]:
        """Watch ``folder``: from operation ``dies_before`` on every one raises ``Killed``; those on a path that ends with
        ``full_at`` raise ENOSPC."""
        self.operations = []
        self._folder, self._dies_before, self._full_at = str(folder), dies_before, full_at
        os.fsync = self._hear_fsync
        try:
            yield self.operations
        finally:
            self._folder = None
            os.fsync = self._fsync

    def _hear(self, event: str, args: tuple[Any, ...]) -> None:
        if self._folder is None:
            return
        if event == "open" and isinstance(args[0], str) and args[2] & WRITES:
            self._count(Operation("open", args[0]))
        elif event in CHANGES:
            to = str(args[1]) if event == "os.rename" else ""
            relative = event in ("os.remove", "os.rmdir") and args[1] != -1  # inside shutil.rmtree
            self._count(Operation(event, f"{self._folder}/*/{args[0]}" if relative else os.fspath(args[0]), to))

    def _hear_fsync(self, handle: int) -> None:
        self._count(Operation("fsync", os.readlink(f"/proc/self/fd/{handle}")))
        if self._dies_before is None:  # who is killed leaves what the kernel has, on the disk or not
            self._fsync(handle)

    def _count(self, operation: Operation) -> None:
        if self._folder is None or not operation.path.startswith(self._folder):
            return
        if self._dies_before is not None and len(self.operations) >= self._dies_before:
            raise Killed(operation)
        self.operations.append(operation)
        if self._full_at is not None and operation.path.endswith(self._full_at):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), operation.path)
