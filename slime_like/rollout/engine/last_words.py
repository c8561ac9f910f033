"""Exit status of an engine's process, and the last lines of its log."""

from __future__ import annotations

import re
import signal
from pathlib import Path

LOG_LINES = 12


def describe_exit(code: int) -> str:
    """Return an exit code of ``Popen`` in words."""
    if code >= 0:
        return f"exited with code {code}"
    try:
        return f"was killed by {signal.Signals(-code).name}"
    except ValueError:  # a real-time signal
        return f"was killed by signal {-code}"


def last_lines(path: str, limit: int = LOG_LINES) -> list[str]:
    """Return the last non-empty lines of a log."""
    try:
        text = Path(path).read_bytes()[-65_536:].decode(errors="replace")
    except OSError as error:
        return [f"(no log: {error})"]
    return [line for line in text.splitlines() if line.strip()][-limit:]


def headline(lines: list[str]) -> str:
    """Return the last line that looks like an error message, to be printed before the log lines."""
    errors = [
        line.strip() for line in lines if re.match(r"\s*([\w.]+(Error|Exception|Exit)\b.*:|slime_like plugin)", line)
    ]
    return f": {errors[-1]}" if errors else ""
