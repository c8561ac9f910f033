"""Make a package of this checkout's code, for nodes whose image has the Python environment but other code."""

from __future__ import annotations

import hashlib
import io
import os
import subprocess
import zipfile
from dataclasses import dataclass
from pathlib import Path

from slime_like.errors import ConfigError
from slime_like.util.deadline import scale

PARTS = ("slime_like", "slime_like_compat", "plugins", "configs", "scripts", "examples", "train.py", "setup.py")
"""Folders and files of a checkout that a run reads."""
MAX_BYTES = 50 * 2**20
LIST_S = 60.0
EPOCH = (1980, 1, 1, 0, 0, 0)  # time of every entry, so that the same files give the same package


@dataclass(frozen=True, slots=True)
class Package:
    """A zip of code. The name contains a hash of its content."""

    name: str
    content: bytes


def make_package(repository: Path) -> Package:
    """Return a package of the files under ``PARTS`` as on disk, except symbolic links and untracked files that git ignores.

    Raises ``ConfigError`` if git cannot list the files, for example outside a checkout, or if the package is larger than
    ``MAX_BYTES``.
    """
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED, compresslevel=6) as archive:
        for path in _files(repository):
            mode = (repository / path).stat().st_mode
            entry = zipfile.ZipInfo(path, date_time=EPOCH)
            entry.external_attr = (mode & 0o777) << 16
            entry.compress_type = zipfile.ZIP_DEFLATED
            archive.writestr(entry, (repository / path).read_bytes())
    content = buffer.getvalue()
    if len(content) > MAX_BYTES:
        raise ConfigError(
            f"--upload: the code in {repository} is {len(content) / 2**20:.0f} MiB, the limit is {MAX_BYTES / 2**20:.0f} MiB: "
            "remove large files from it, or add them to .gitignore"
        )
    return Package(f"_ray_pkg_{hashlib.sha256(content).hexdigest()[:32]}.zip", content)


def _files(repository: Path) -> list[str]:
    """Return the sorted paths of the regular files to package, relative to ``repository``; symbolic links are left out.

    Raises ``ConfigError`` if git cannot list the files.
    """
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard", "--", *PARTS]
    try:
        output = subprocess.run(
            command, cwd=repository, capture_output=True, check=True, timeout=LIST_S * scale()
        ).stdout
    except (OSError, subprocess.SubprocessError) as error:
        raise ConfigError(
            f"--upload: git cannot list the files of {repository} ({error}): run it in a git checkout, or omit --upload, "
            "so that the nodes run the code at --code"
        ) from error
    paths = sorted({os.fsdecode(name) for name in output.split(b"\0") if name})
    return [path for path in paths if (repository / path).is_file() and not (repository / path).is_symlink()]
