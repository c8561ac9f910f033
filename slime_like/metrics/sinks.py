"""Sinks of reduced metrics: metrics.jsonl in every run; console, tensorboard, wandb and user sinks if configured."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Mapping, Sequence, Set
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TextIO

from rich.console import Console

from slime_like.checkpoint.files import replacing
from slime_like.config.schema.run import MetricsConfig
from slime_like.errors import ConfigError
from slime_like.metrics.appended import AppendOnlyFile
from slime_like.metrics.log import DAMAGED, RetainedLines, read_retained_lines
from slime_like.metrics.types import KeepsWarnings, RunWarning, ShowsNotes, Sink, SinkContext, StepSpans
from slime_like.metrics.user_sink import open_sink
from slime_like.metrics.view import LiveConsole, PlainConsole
from slime_like.util.counted import counted
from slime_like.util.reading import reason

DROPPED = "metrics_dropped.jsonl"  # file next to the log, with lines of steps that the run does again


def open_sinks(
    config: MetricsConfig,
    run_dir: Path,
    *,
    first_step: int,
    num_steps: int,
    settings: Mapping[str, Any] | None = None,
    console: TextIO | None = None,
) -> SinkGroup:
    """Open all sinks of ``config``.

    ``first_step`` is the step that a resumed run continues from, 0 in a new run; ``settings`` must not contain prompts.
    Raises ``ConfigError`` if metrics.jsonl cannot be read or written, if a sink is unknown or its library is not installed,
    if wandb does not start, if the id of its run is not valid or cannot be read or stored, and for a user sink in the cases
    that ``open_sink`` names.
    """
    stream = console or sys.stdout
    log = JsonlSink(run_dir / "metrics.jsonl", first_step)
    sinks: list[Sink] = [log]
    kind = config.console
    if kind == "auto":
        kind = "live" if stream.isatty() else "plain"
    if kind == "live":
        sinks.append(LiveConsole(Console(file=stream), first_step, num_steps))
    elif kind == "plain":
        sinks.append(PlainConsole(stream, num_steps))
    context = SinkContext(run_dir, first_step, num_steps, settings or {})
    by_flag = [name for name, flag in (("tensorboard", config.tensorboard), ("wandb", config.wandb)) if flag]
    sinks += [open_sink(name, config, context) for name in dict.fromkeys([*by_flag, *config.sinks])]
    group = SinkGroup(sinks)
    if log.message:
        group.note(log.message)
    return group


@dataclass(slots=True)
class SinkGroup:
    """All sinks of a run, called as one. Calls of ``note`` and ``warn`` skip sinks without these methods."""

    sinks: Sequence[Sink]

    def log(self, step: int, values: Mapping[str, float], spans: StepSpans) -> None:
        """Log one step to every sink."""
        for sink in self.sinks:
            sink.log(step, values, spans)

    def note(self, text: str) -> None:
        """Show a line of text in every sink that shows notes. Unlike a warning, it is not recorded in metrics.jsonl."""
        for sink in self.sinks:
            if isinstance(sink, ShowsNotes):
                sink.note(text)

    def warn(self, step: int, warning: RunWarning) -> None:
        """Record ``warning`` in every sink that records warnings."""
        for sink in self.sinks:
            if isinstance(sink, KeepsWarnings):
                sink.warn(step, warning)

    def close(self) -> None:
        """Flush and close every sink, even if closing another one fails."""
        with ExitStack() as closing:
            for sink in self.sinks:
                closing.callback(sink.close)


@dataclass(slots=True)
class JsonlSink:
    """Sink that writes one line per step: ``{"step", "time", <metric>: number, ..., "spans": {name: [start, stop]}}``.

    A step with warnings also has ``"warnings": [text, ...]``. On resume, lines of steps after ``first_step``, which the
    run repeats, and an incomplete last line move to metrics_dropped.jsonl. Other unreadable lines move to
    metrics.damaged.jsonl. In a new run, all lines of an existing file move to metrics_dropped.jsonl, and ``message`` gives their
    number. The constructor raises ``ConfigError`` if the file cannot be read or written.
    """

    path: Path
    first_step: int
    message: str = field(init=False)  # about missing, unreadable or moved lines; empty if there are none
    _file: AppendOnlyFile = field(init=False)
    _warnings: list[str] = field(default_factory=list[str], init=False)  # warnings of the step that is logged next

    def __post_init__(self) -> None:
        retained = read_retained_lines(self.path, self.first_step) if self.first_step else RetainedLines((), (), "")
        self.message = retained.note
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            if retained.damaged:
                with self.path.with_name(DAMAGED).open("ab") as file:
                    file.writelines(line + b"\n" for line in retained.damaged)
            num_dropped = _move_dropped_lines(self.path, {*retained.lines, *retained.damaged})
            if num_dropped and not self.first_step:
                lines = counted(num_dropped, "line")
                self.message = f"{self.path} had {lines} of an earlier run, moved to {self.path.with_name(DROPPED)}"
            with replacing(self.path) as scratch:  # atomic, as no other file has the earlier steps
                scratch.write_bytes(b"".join(line + b"\n" for line in retained.lines))
            self._file = AppendOnlyFile(self.path)
        except OSError as error:
            raise ConfigError(
                f"{self.path} cannot be written ({reason(error)}): move it away, or free disk space"
            ) from error

    def log(self, step: int, values: Mapping[str, float], spans: StepSpans) -> None:
        """Write one line immediately, so that a killed run loses no step. Keep it in memory while it cannot be written."""
        row: dict[str, Any] = {
            "step": step,
            "time": time.time(),
            **values,
            "spans": {name: list(span) for name, span in spans.items()},
        }
        if self._warnings:
            row["warnings"], self._warnings = self._warnings, []
        self._file.write(json.dumps(row) + "\n")

    def warn(self, step: int, warning: RunWarning) -> None:
        """Add the warning to the line that is logged next."""
        del step
        self._warnings.append(str(warning))

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def _move_dropped_lines(path: Path, retained: Set[bytes]) -> int:
    """Append the lines of ``path`` that are not in ``retained`` to metrics_dropped.jsonl, and return their number."""
    dropped_lines = (
        [line for line in path.read_bytes().split(b"\n") if line.strip() and line not in retained]
        if path.exists()
        else []
    )
    if dropped_lines:
        with path.with_name(DROPPED).open("ab") as file:
            file.writelines(line + b"\n" for line in dropped_lines)
    return len(dropped_lines)
