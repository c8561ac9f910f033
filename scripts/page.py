"""Files and page sections to which scripts write their measurements."""

from __future__ import annotations

import argparse
import subprocess
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[1]
GIT_S = 60.0


class TableFile:
    """File that a script rewrites with its results. A file that the script did not write is rejected."""

    def __init__(self, path: Path, script: str) -> None:
        """Check the file at ``path``.

        Raises ``ArgumentTypeError``, which argparse prints, if the file cannot be read or ``script`` did not write it.
        """
        self.path = path
        self._first_line = f"<!-- written by scripts/{script}, which replaces this file -->\n"
        try:
            is_foreign = path.exists() and not path.read_text().startswith(self._first_line)
        except (OSError, UnicodeDecodeError) as error:
            raise argparse.ArgumentTypeError(f"{path} cannot be read: {error}") from error
        if is_foreign:
            raise argparse.ArgumentTypeError(
                f"{path} was not written by {script}, which would replace it: name another file"
            )

    def write(self, text: str) -> None:
        """Replace the content of the file."""
        self.path.write_text(f"{self._first_line}\n{text}")


def commit() -> str:
    """Return the short hash of this checkout's commit; "unknown" if git is missing or fails."""
    command = ["git", "rev-parse", "--short", "HEAD"]
    try:
        result = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=True, timeout=GIT_S)
    except (OSError, subprocess.SubprocessError):
        return "unknown"
    return result.stdout.strip()


def replace_section(page: Path, heading: str, text: str) -> None:
    """Replace the section of ``page`` that begins with the line ``heading``, or append it; keep other sections."""
    head, present, body = page.read_text().partition(f"{heading}\n")
    next_heading = body.find("\n## ") if present else -1
    following_sections = f"\n{body[next_heading:].strip()}\n" if next_heading >= 0 else ""
    page.write_text(f"{head.rstrip()}\n\n{text.strip()}\n{following_sections}")
