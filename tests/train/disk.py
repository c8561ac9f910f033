"""Disk faults in tests: record the operations on a folder, and kill the process or fill the disk before one of them.

After a simulated kill, further operations fail too, so the folder stays as a killed process leaves it. Python's audit
events report every open for writing, rename and removal in any library; ``fsync`` has no audit event and is wrapped.
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
    """Simulated kill of the process."""


@dataclass(frozen=True, slots=True)
class Operation:
    """A change of the file system that is about to be made."""

    event: str
    path: str
    to: str = ""


class Disk:
    """Recorder of file operations. One per process, because audit hooks cannot be removed."""

    def __init__(self) -> None:
        self.operations: list[Operation] = []
        self._folder: str | None = None
        self._dies_before: int | None = None
        self._full_at: str | None = None
        self._fsync = os.fsync
        sys.addaudithook(self._on_event)

    @contextlib.contextmanager
    def watching(
        self, folder: Path, *, dies_before: int | None = None, full_at: str | None = None
    ) -> Generator[list[Operation]]:
        """Record the operations on ``folder`` and yield them.

        From operation ``dies_before`` on, every operation raises ``Killed``. Operations on a path that ends with
        ``full_at`` raise ENOSPC.
        """
        self.operations = []
        self._folder, self._dies_before, self._full_at = str(folder), dies_before, full_at
        os.fsync = self._on_fsync
        try:
            yield self.operations
        finally:
            self._folder = None
            os.fsync = self._fsync

    def _on_event(self, event: str, args: tuple[Any, ...]) -> None:
        if self._folder is None:
            return
        if event == "open" and isinstance(args[0], str) and args[2] & WRITES:
            self._count(Operation("open", args[0]))
        elif event in CHANGES:
            to = str(args[1]) if event == "os.rename" else ""
            relative = event in ("os.remove", "os.rmdir") and args[1] != -1  # inside shutil.rmtree
            self._count(Operation(event, f"{self._folder}/*/{args[0]}" if relative else os.fspath(args[0]), to))

    def _on_fsync(self, handle: int) -> None:
        self._count(Operation("fsync", os.readlink(f"/proc/self/fd/{handle}")))
        if self._dies_before is None:  # a killed process leaves unsynced data to the kernel
            self._fsync(handle)

    def _count(self, operation: Operation) -> None:
        if self._folder is None or not operation.path.startswith(self._folder):
            return
        if self._dies_before is not None and len(self.operations) >= self._dies_before:
            raise Killed(operation)
        self.operations.append(operation)
        if self._full_at is not None and operation.path.endswith(self._full_at):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), operation.path)
