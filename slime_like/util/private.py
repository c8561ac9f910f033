"""Private files and folders of this user in world-writable locations."""

from __future__ import annotations

import errno
import fcntl
import os
import stat
import tempfile
import time
from collections.abc import Generator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO

from slime_like.errors import SlimeLikeError
from slime_like.util.deadline import Deadline

POLL_S = 0.1
OTHER_USERS = 0o077  # permission bits of all users but the owner


def private_folder(path: Path) -> Path:
    """Create ``path`` with its parents, or reuse it if it is a folder that only this user can enter.

    Raises ``OSError`` if ``path`` cannot be created, ``SlimeLikeError`` if it is a file or a link, is owned by another user, or
    is open to others, who may have written to it.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with suppress(FileExistsError):
        path.mkdir(mode=0o700)
    state = path.lstat()
    if not (stat.S_ISDIR(state.st_mode) and state.st_uid == os.geteuid() and not state.st_mode & OTHER_USERS):
        raise SlimeLikeError(
            f"{path} is not a private folder of this user: remove it, or run chmod 700 on it if it is yours"
        )
    return path


def temporary_folder(name: str, place: str | None = None) -> Path:
    """Create or reuse ``name`` in this user's private folder in ``place``, by default the system's folder for temporary files.

    This user's processes share it. Raises ``SlimeLikeError`` as ``private_folder`` does, ``OSError`` if it cannot be created.
    """
    root = private_folder(Path(place or tempfile.gettempdir()) / f"slime_like-{os.geteuid()}")
    return private_folder(root / name)


def create_private(path: Path) -> IO[bytes]:
    """Create ``path`` for this user only, open for reading and writing; an existing file is removed.

    Raises ``OSError`` if the existing file cannot be removed or the new one cannot be created. A file or link that another
    process creates at ``path`` after the removal is not opened: it raises ``OSError`` too.
    """
    path.unlink(missing_ok=True)
    return os.fdopen(os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600), "w+b")


def open_lock(path: Path) -> IO[bytes]:
    """Open a lock file, creating it if necessary. Nothing is written to it.

    If the file belongs to this user, other users lose access to it. Raises ``OSError`` if it cannot be opened or is not a
    regular file, or if ``path`` is a symbolic or hard link: with a link, another user could make this process lock a different
    file.
    """
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, 0o600)
    state = os.fstat(fd)
    if not stat.S_ISREG(state.st_mode) or state.st_nlink != 1:
        os.close(fd)
        raise OSError(errno.EINVAL, "not a regular file; remove it", str(path))
    if state.st_uid == os.geteuid():
        os.fchmod(fd, 0o600)  # anyone who can open it can lock it and block every run
    return os.fdopen(fd, "r+b", buffering=0)


@contextmanager
def exclusive(path: Path, deadline: Deadline, holder: str) -> Generator[None]:
    """Hold the lock file ``path``, waiting while another process holds it.

    Raises ``DeadlineExceeded`` naming ``holder`` once ``deadline`` has passed, and ``OSError`` as ``open_lock`` does.
    """
    with open_lock(path) as lock:
        while True:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                deadline.remaining(holder)
                time.sleep(POLL_S)
        yield


def owned_by_another_user(path: Path) -> Path | None:
    """Return ``path`` or its nearest parent that is in a world-writable folder and belongs to another user, other than root.

    Return None if there is no such path.
    """
    for part in (path, *path.parents):
        try:
            state, parent_state = part.lstat(), part.parent.lstat()
        except OSError:  # does not exist yet
            continue
        if parent_state.st_mode & stat.S_IWOTH and state.st_uid not in (0, os.geteuid()):
            return part
    return None
