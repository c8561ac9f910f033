"""Cache folders of compiled code. The folders are private, as processes execute their content."""

from __future__ import annotations

import os
import stat
import tempfile
from pathlib import Path

from slime_like.errors import SlimeLikeError
from slime_like.util.private import temporary_folder

WRITABLE = 0o022  # by users other than the owner
FALLBACK = "/tmp"  # not TMPDIR, because an engine removes its TMPDIR when it exits


def cache_folder(name: str) -> Path:
    """Create or reuse ``slime_like/<name>`` in ``$XDG_CACHE_HOME`` (by default ``~/.cache``), else a folder in ``/tmp``.

    ``/tmp`` is used if the first location is unknown (no home), if the folder cannot be created there, or if another user could
    replace that location or one of its parents. Raises ``SlimeLikeError`` if an existing folder is not private, ``OSError`` if
    no location is usable.
    """
    base = _base()
    if base is not None and not is_replaceable(base):
        folder = base / "slime_like" / name
        try:
            for part in (folder.parent, folder):  # a user who can write to the first could replace the second
                part.mkdir(parents=True, exist_ok=True, mode=0o700)
        except OSError:
            pass
        else:
            for part in (folder.parent, folder):
                if not is_private(part):
                    raise SlimeLikeError(f"{part} is not private to this user: make it yours with chown and chmod 700")
            return folder
    return temporary_folder(name, FALLBACK)


def is_private(path: Path) -> bool:
    """Return whether ``path`` is not a link, belongs to this user and is not writable by others."""
    state = path.lstat()
    return state.st_uid == os.geteuid() and not state.st_mode & WRITABLE and not path.is_symlink()


def is_replaceable(path: Path) -> bool:
    """Return whether another user could replace ``path`` or one of its parents.

    If one of them is a symbolic link, this includes the link's target and the target's parents.
    """
    unchecked_parts, checked_parts = [path.absolute()], set[Path]()
    while unchecked_parts:
        part = unchecked_parts.pop()
        if part in checked_parts:
            continue
        checked_parts.add(part)
        unchecked_parts += [part.parent] * (part != part.parent)
        try:
            state = part.lstat()
        except OSError:  # does not exist yet
            continue
        if is_link := stat.S_ISLNK(state.st_mode):
            unchecked_parts.append(Path(os.path.normpath(part.parent / os.readlink(part))))
        shared = state.st_mode & WRITABLE and not (state.st_mode & stat.S_ISVTX or is_link)
        if shared or state.st_uid not in (0, os.geteuid()):
            return True
    return False


def keep_caches_private() -> None:
    """Set private cache folders for libraries that compile code, in this process and its children.

    torch's default is ``/tmp/torchinductor_<user>``, which another user can create first. Triton, FlashInfer, SGLang and CUDA
    cache in the home folder: if that is missing or not writable, HOME is replaced. Models in the old home folder stay
    available. Raises ``SlimeLikeError`` and ``OSError`` as ``cache_folder`` does.
    """
    os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(cache_folder("inductor")))
    home = Path(os.path.expanduser("~"))
    try:
        tempfile.TemporaryFile(dir=home).close()  # permission bits are not reliable for root and network file systems
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
    except RuntimeError:  # no HOME, and no entry of the user in the password database
        return None
