"""Files and folders of this user alone, in places where every user of the machine may write."""

from __future__ import annotations

import os
import stat
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import IO

from slime_like.errors import SlimeLikeError

OTHERS = 0o077  # permission bits of everybody but the owner


def private_folder(path: Path) -> Path:
    """Make ``path``, with its parents, or take it where it is a folder that only this user can enter.

    Raises ``SlimeLikeError`` where it is a link, somebody else's, or open to others: what lies in it may be theirs.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with suppress(FileExistsError):
        path.mkdir(mode=0o700)
    state = path.lstat()
    if not (stat.S_ISDIR(state.st_mode) and state.st_uid == os.geteuid() and not state.st_mode & OTHERS):
        raise SlimeLikeError(f"{path} is not a folder of this user alone: remove it, or chmod 700 it where it is yours")
    return path


def temporary_folder(name: str, place: str | None = None) -> Path:
    """Make or take this user's own folder ``name`` among temporary files, the same one in each process.

    Raises ``SlimeLikeError`` where somebody else has taken its place, ``OSError`` where it cannot be written to.
    """
    root = private_folder(Path(place or tempfile.gettempdir()) / f"slime_like-{os.geteuid()}")
    return private_folder(root / name)


def create_private(path: Path) -> IO[bytes]:
    """Create ``path`` for this user alone, open for reading and writing; what had its name is gone.

    Raises ``OSError`` where somebody else was faster: an existing file is never opened, a link never followed.
    """
    path.unlink(missing_ok=True)
    return os.fdopen(os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600), "w+b")


def open_lock(path: Path) -> IO[bytes]:
    """Open a file to lock, creating it for this user alone. Nothing is written to it.

    Raises ``OSError`` where it is a link or no file: another user could make us lock, and seem to hold, what is not ours.
    """
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, 0o600)
    state = os.fstat(fd)
    if not stat.S_ISREG(state.st_mode) or state.st_nlink != 1:
        os.close(fd)
        raise OSError(f"{path} is not a plain file: remove it")
    if state.st_uid == os.geteuid():
        os.fchmod(fd, 0o600)  # who may open it may lock it, and keep every run out
    return os.fdopen(fd, "r+b", buffering=0)


def planted_by_another(path: Path) -> Path | None:
    """Return the part of ``path`` that another user made where others may make folders, as in /tmp; None without one."""
    for part in (path, *path.parents):
        try:
            state, above = part.lstat(), part.parent.lstat()
        except OSError:  # not there yet
            continue
        if above.st_mode & stat.S_IWOTH and state.st_uid not in (0, os.geteuid()):
            return part
    return None
