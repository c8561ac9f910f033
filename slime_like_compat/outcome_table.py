"""Table of launch scripts by the outcome of their conversion, for slime and verl."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path

from slime_like.errors import SlimeLikeError
from slime_like_compat.conversion import CODE, SAME, Conversion


def may_contain(path: Path, pattern: str) -> bool:
    """Return True if ``path`` is a file that contains ``pattern``, or one that cannot be read, which the table then reports."""
    try:
        return path.is_file() and re.search(pattern, path.read_text(errors="replace")) is not None
    except OSError:
        return True


def class_table(folder: Path, classes: Mapping[str, str], outcomes: Mapping[Path, tuple[str, str]]) -> str:
    """Return a table that counts scripts by class of outcome, then a line per script.

    ``classes`` maps the name of a class to its meaning, ``outcomes`` maps a script to the name of its class and the reason.
    """
    return "\n".join(_lines(folder, classes, outcomes)) + "\n"


def _lines(folder: Path, classes: Mapping[str, str], outcomes: Mapping[Path, tuple[str, str]]) -> Iterator[str]:
    counts = Counter(name for name, _ in outcomes.values())
    yield "| class | scripts |"
    yield "|---|---|"
    for name, meaning in classes.items():
        yield f"| {meaning} | {counts[name]} |"
    yield f"| all | {len(outcomes)} |"
    yield ""
    for path, (name, reason) in outcomes.items():
        yield f"{name:8}{path.relative_to(folder)}" + (f": {reason}" if reason else "")


def outcome(conversion: Conversion, sign: str) -> tuple[str, str]:
    """Return the class of a conversion's outcome, and the settings that decide it, each written as name, ``sign`` and value."""
    if conversion.code == SAME:
        return "same", ""
    name, verdicts = ("code", ("code",)) if conversion.code == CODE else ("refused", ("refused", "unknown"))
    rows = [row for row in conversion.rows if row.verdict in verdicts]
    if not rows:
        name, rows = "value", [row for row in conversion.rows if row.verdict == "needed"]
    return name, ", ".join(f"{row.flag}{sign}{row.value_text}".strip() for row in rows)


def first_line(error: SlimeLikeError, path: Path) -> str:
    """Return the first line of an error about ``path``; ``path:3`` becomes ``line 3``, and ``path`` alone its file name."""
    line = re.sub(rf"{re.escape(str(path))}:(?=\d)", "line ", str(error).splitlines()[0])
    return line.replace(str(path), path.name)
