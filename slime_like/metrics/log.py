"""metrics.jsonl, the one log of a run: a line per step, read back by a run that goes on and by its report."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from slime_like.errors import ConfigError
from slime_like.util.reading import InputFile, parse_json, reason, shown, typed

DAMAGED = "metrics.damaged.jsonl"  # beside the log: lines that a run could not read when it went on


@dataclass(frozen=True, slots=True)
class LogRow:
    """One line of metrics.jsonl."""

    step: int
    time: float  # s since the epoch
    values: Mapping[str, float]
    spans: Mapping[str, tuple[float, float]]  # phase -> start and stop, s since the epoch
    warnings: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Kept:
    """The lines of a log up to a step, and the lines that cannot be read."""

    lines: tuple[bytes, ...]
    damaged: tuple[bytes, ...]
    note: str  # about both, for people; empty where nothing is missing


def parse_row(line: bytes) -> LogRow:
    """Return the row of one line. Raises ``ValueError`` saying which field cannot be used."""
    fields = typed(parse_json(line), dict[str, Any])
    step = _number(fields, "step")
    if not math.isfinite(step):
        raise ValueError(f"step is {step}")
    at = _number(fields, "time") if "time" in fields else math.nan
    spans = typed(fields.pop("spans", None) or {}, dict[str, tuple[float, float]])
    warnings = typed(fields.pop("warnings", None) or (), tuple[str, ...])
    return LogRow(int(step), at, {name: _number(fields, name) for name in list(fields)}, spans, warnings)


def keep(path: Path, last_step: int) -> Kept:
    """Return the lines of ``path`` that a run which goes on after ``last_step`` keeps: those of the steps so far.

    A torn last line is what a killed run leaves; any other line that cannot be read is damaged. Raises ``ConfigError``
    where ``path`` is no file that can be read.
    """
    if not path.exists():
        return Kept((), (), f"{path} is missing: its curves begin after step {last_step}")
    content = InputFile(path, ConfigError, "move it away, and the run begins another").data()
    lines: list[bytes] = []
    damaged: list[bytes] = []
    why, steps = "", set[int]()
    pieces = content.split(b"\n")
    for number, line in enumerate(pieces, 1):
        if not line.strip():
            continue
        try:
            step = parse_row(line).step
        except ValueError as error:
            if number < len(pieces):
                damaged.append(line)
                why = why or f"line {number}: {reason(error)}"
            continue
        if step <= last_step:
            lines.append(line)
            steps.add(step)
    notes = (
        [f"{len(damaged)} lines of {path} cannot be read ({why}); they now lie in {path.with_name(DAMAGED)}"]
        if damaged
        else []
    )
    if lost := [step for step in range(1, last_step + 1) if step not in steps]:
        which = f"{lost[0]} to {lost[-1]}" if len(lost) == lost[-1] - lost[0] + 1 else ", ".join(map(str, lost[:5]))
        notes.append(f"{path} has no line of the steps {which}, which were trained")
    return Kept(tuple(lines), tuple(damaged), "; ".join(notes))


def _number(fields: dict[str, Any], name: str) -> float:
    """Take field ``name`` out of a line."""
    value = fields.pop(name, None)
    try:
        return typed(value, float)
    except ValueError as error:
        raise ValueError(f"{shown(name)} is {shown(value)}, not a number") from error
