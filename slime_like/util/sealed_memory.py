"""Memory of a fixed size, shared by processes of one user on one machine: a memfd, which has no path in the file system.

The kernel frees it when no process has it open or mapped. Another process opens it through ``/proc/<pid>/fd``, which only
processes of the same user, or of root, can read.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import stat

SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL


def create_sealed(name: str, num_bytes: int) -> tuple[int, mmap.mmap]:
    """Return the file descriptor and the mapping of new memory of ``num_bytes``, at least one byte."""
    size = max(num_bytes, 1)
    fd = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, size)
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, SEALS)
    return fd, mmap.mmap(fd, size)


def map_sealed(pid: int, fd: int, access: int) -> mmap.mmap:
    """Map the sealed memory that process ``pid`` has open as ``fd``.

    Raises ``OSError`` if it cannot be opened or mapped, ``ValueError`` if it is not sealed memory of this user.
    """
    path = f"/proc/{pid}/fd/{fd}"
    mode = os.O_RDWR if access == mmap.ACCESS_WRITE else os.O_RDONLY
    own_fd = os.open(path, mode | os.O_CLOEXEC | os.O_NONBLOCK)
    try:
        state = os.fstat(own_fd)
        if not (stat.S_ISREG(state.st_mode) and state.st_uid == os.getuid() and _cannot_shrink(own_fd)):
            raise ValueError(f"{path} is not sealed memory of this user")
        return mmap.mmap(own_fd, state.st_size, access=access)
    finally:
        os.close(own_fd)


def _cannot_shrink(fd: int) -> bool:
    """Return whether the memory is sealed against shrinking, which would kill a reader with SIGBUS."""
    try:
        return bool(fcntl.fcntl(fd, fcntl.F_GET_SEALS) & fcntl.F_SEAL_SHRINK)
    except OSError:  # not a memfd
        return False
