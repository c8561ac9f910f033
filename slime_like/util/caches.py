"""Folders of compiled code, which is executed: of this user alone, all the way up, and there without a writable home."""

from __future__ import annotations

import os
import stat
import tempfile
from pathlib import Path

from slime_like.errors import SlimeLikeError
from slime_like.util.private import temporary_folder

WRITABLE = 0o022  # by others than the owner
SHORT = "/tmp"  # not TMPDIR: that of an engine ends with it


def cache_folder(name: str) -> Path:
    """Make or take the cache ``name`` in ``$XDG_CACHE_HOME`` or ``~/.cache``, else among temporary files.

    It lies among temporary files where the other place cannot be written to, or where somebody else could replace a folder
    above. Raises ``SlimeLikeError`` where the folder itself is not this user's alone, ``OSError`` where there is no place.
    """
    base = _base()
    if base is not None and not replaceable(base):
        folder = base / "slime_like" / name
        try:
            for part in (folder.parent, folder):  # who may write to the first could put another in place of the second
                part.mkdir(parents=True, exist_ok=True, mode=0o700)
        except OSError:
            pass
        else:
            for part in (folder.parent, folder):
                if not is_private(part):
                    raise SlimeLikeError(f"{part} is not this user's alone: chown and chmod 700 it")
            return folder
    return temporary_folder(name, SHORT)


def is_private(path: Path) -> bool:
    """Return whether only this user can change what ``path`` itself is: no link, its own, not writable by others."""
    state = path.lstat()
    return state.st_uid == os.geteuid() and not state.st_mode & WRITABLE and not path.is_symlink()


def replaceable(path: Path) -> bool:
    """Return whether another user could put a folder in place of ``path`` or of one above it."""
    real = path.resolve()
    for part in (real, *real.parents):
        if part.exists():
            state = part.stat()
            shared = state.st_mode & WRITABLE and not state.st_mode & stat.S_ISVTX
            if shared or state.st_uid not in (0, os.geteuid()):
                return True
    return False


def keep_caches_private() -> None:
    """Point libraries of this process, and of those it starts, that compile code to folders of this user alone.

    torch's own is ``/tmp/torchinductor_<user>``, which anybody can make first. A home that cannot be written to, which Triton,
    FlashInfer, SGLang and CUDA would keep theirs in, is replaced; what was downloaded to it is still found.
    """
    os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(cache_folder("inductor")))
    home = Path(os.path.expanduser("~"))
    try:
        tempfile.TemporaryFile(dir=home).close()  # what permissions say is not so for root, and over a network
    except OSError:
        pass
    else:
        return
    os.environ["HOME"] = str(cache_folder("home"))
    if not {"HF_HOME", "XDG_CACHE_HOME"} & os.environ.keys():
        os.environ["HF_HOME"] = str(home / ".cache" / "huggingface")


def _base() -> Path | None:
    try:
        return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    except RuntimeError:  # no HOME, and a user without an entry
        return None
