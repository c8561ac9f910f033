"""metrics.jsonl, the log of a run with one line per step, which a resumed run and the report read."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from slime_like.errors import ConfigError
from slime_like.util.counted import counted
from slime_like.util.reading import InputFile, abbreviate, parse_json, reason, typed

DAMAGED = "metrics.damaged.jsonl"  # file next to the log, with lines that a resumed run could not read


@dataclass(frozen=True, slots=True)
class LogRow:
    """One line of metrics.jsonl."""

    step: int
    time: float  # s since the epoch
    values: Mapping[str, float]
    spans: Mapping[str, tuple[float, float]]  # phase -> start and stop, s since the epoch
    warnings: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class RetainedLines:
    """Lines of a log that a resumed run keeps, and lines that it cannot read."""

    lines: tuple[bytes, ...]
    damaged: tuple[bytes, ...]
    note: str  # message about missing and damaged lines; empty if there are none


def parse_row(line: bytes) -> LogRow:
    """Return the row of a line.

    Raises ``ValueError`` if the line is not a JSON object, if ``step`` is missing or not finite, or if a field has a wrong type.
    """
    fields = typed(parse_json(line), dict[str, Any])
    step = _number(fields, "step")
    if not math.isfinite(step):
        raise ValueError(f"step is {step}")
    timestamp = _number(fields, "time") if "time" in fields else math.nan
    spans = typed(fields.pop("spans", None) or {}, dict[str, tuple[float, float]])
    warnings = typed(fields.pop("warnings", None) or (), tuple[str, ...])
    return LogRow(int(step), timestamp, {name: _number(fields, name) for name in list(fields)}, spans, warnings)


def read_retained_lines(path: Path, last_step: int) -> RetainedLines:
    """Return the lines of ``path`` up to ``last_step``, which a run that resumes from this step keeps.

    An incomplete last line, which a killed run can leave, is dropped. All other unreadable lines are returned as ``damaged``.
    If the file is missing, no lines are returned, and the result's ``note`` says so. Raises ``ConfigError`` if the file exists
    but cannot be read.
    """
    if not path.exists():
        return RetainedLines((), (), f"{path} is missing: the curves of the run begin after step {last_step}")
    content = InputFile(path, ConfigError, "move it away; the run then starts a new one").data()
    lines: list[bytes] = []
    damaged: list[bytes] = []
    first_problem, steps = "", set[int]()
    all_lines = content.split(b"\n")
    for number, line in enumerate(all_lines, 1):
        if not line.strip():
            continue
        try:
            step = parse_row(line).step
        except ValueError as error:
            if number < len(all_lines):
                damaged.append(line)
                first_problem = first_problem or f"line {number}: {reason(error)}"
            continue
        if step <= last_step:
            lines.append(line)
            steps.add(step)
    notes = (
        [
            f"{counted(len(damaged), 'line')} of {path} cannot be read ({first_problem}), moved to {path.with_name(DAMAGED)}"
        ]
        if damaged
        else []
    )
    if missing := [step for step in range(1, last_step + 1) if step not in steps]:
        steps_text = (
            f"{missing[0]} to {missing[-1]}"
            if len(missing) == missing[-1] - missing[0] + 1
            else ", ".join(map(str, missing[:5]))
        )
        notes.append(f"{path} has no lines for the steps {steps_text}, which were trained")
    return RetainedLines(tuple(lines), tuple(damaged), "; ".join(notes))


def _number(fields: dict[str, Any], name: str) -> float:
    """Pop field ``name`` of a line as a number. Raises ``ValueError`` if it is missing or not a number."""
    value = fields.pop(name, None)
    try:
        return typed(value, float)
    except ValueError as error:
        raise ValueError(f"{abbreviate(name)} is {abbreviate(value)}, not a number") from error
