"""Lookup of files that a launch script names, even if their path is partly unknown or differs on this machine."""

from __future__ import annotations

import os.path
from pathlib import Path

from slime_like.errors import ConfigError
from slime_like.util.reading import InputFile
from slime_like_compat.shell.values import Value


def script_text(script: Path) -> str:
    """Return the text of a launch script. Raises ``ConfigError`` if it cannot be read."""
    return InputFile(script, ConfigError, "give a launch script").text()


def find_file(value: Value, script: Path) -> Path | None:
    """Return the file at the path ``value``; a relative path is relative to the script's folder.

    If there is no such file, or the path is partly unknown, search the script's folder and the folders above it. The search is
    first for the whole path without ``..``, then for its end, with one part fewer each time, down to the last two parts. Return
    None if no file is found. A file in a folder without permission, or with a name that is too long, counts as missing.
    """
    written_path = Path(value.text)
    path = written_path if written_path.is_absolute() else script.parent / written_path
    if not value.problem and os.path.isfile(path):
        return path
    names = [name for name in written_path.parts if name not in ("/", ".", "..")]
    folders = [script.resolve().parent, *script.resolve().parents]
    for length in range(len(names), 1, -1):
        for folder in folders:
            if os.path.isfile(candidate := folder.joinpath(*names[-length:])):
                return candidate
    return None


def is_elsewhere(path: Path, value: Value, script: Path) -> bool:
    """Return True if ``path``, which ``find_file`` returned for ``value``, is not the path that the script names.

    Return True as well if a part of that path is unknown.
    """
    return bool(value.problem) or path != script.parent / value.text  # joining an absolute path returns that path
