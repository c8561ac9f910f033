"""Launch scripts by outcome: one table for scripts of every project."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path

from slime_like.errors import ConfigError
from slime_like_compat.slime.job import CODE, SAME, Converted


def class_table(folder: Path, classes: Mapping[str, str], outcomes: Mapping[Path, tuple[str, str]]) -> str:
    """Return a table of counts by class, then a line per script. ``found``: script -> name of its class, and the reason."""
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


def outcome(converted: Converted, sign: str) -> tuple[str, str]:
    """Return the class of a script that could be read, and the settings that are the reason, each with ``sign`` before its
    value."""
    if converted.code == SAME:
        return "same", ""
    name = "code" if converted.code == CODE else "refused"
    rows = [row for row in converted.rows if row.verdict in (("code",) if name == "code" else ("refused", "unknown"))]
    if not rows:
        name, rows = "value", [row for row in converted.rows if row.verdict == "needed"]
    return name, ", ".join(f"{row.flag}{sign}{row.value_text}".strip() for row in rows)


def first_line(error: ConfigError, path: Path) -> str:
    """Return the first line of a message about ``path``, without its folder."""
    return str(error).splitlines()[0].replace(f"{path}:", "line ").replace(str(path), path.name)
