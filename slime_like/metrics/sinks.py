"""Sinks of reduced metrics: metrics.jsonl always; console, tensorboard, wandb and a user's own if configured."""

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

from slime_like.config.schema.run import MetricsConfig
from slime_like.errors import ConfigError
from slime_like.metrics.appended import Appended
from slime_like.metrics.log import DAMAGED, RetainedLines, keep
from slime_like.metrics.types import KeepsWarnings, RunWarning, ShowsNotes, Sink, SinkContext, StepSpans
from slime_like.metrics.user_sink import open_sink
from slime_like.metrics.view import LiveConsole, PlainConsole
from slime_like.util.reading import reason


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

    ``first_step`` is the step a resumed run continues from; ``settings`` contain no prompts. Raises ``ConfigError`` if a
    required library is not installed, or if a user's sink cannot be constructed or lacks a method.
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
    switched_on = [name for name, on in (("tensorboard", config.tensorboard), ("wandb", config.wandb)) if on]
    sinks += [open_sink(name, config, context) for name in dict.fromkeys([*switched_on, *config.sinks])]
    out = SinkGroup(sinks)
    if log.damage:
        out.note(log.damage)
    return out


@dataclass(slots=True)
class SinkGroup:
    """Forward everything to every sink."""

    sinks: Sequence[Sink]

    def log(self, step: int, values: Mapping[str, float], spans: StepSpans) -> None:
        """Log one step to every sink."""
        for sink in self.sinks:
            sink.log(step, values, spans)

    def note(self, text: str) -> None:
        """Display a line of text; it is not recorded."""
        for sink in self.sinks:
            if isinstance(sink, ShowsNotes):
                sink.note(text)

    def warn(self, step: int, warning: RunWarning) -> None:
        """Record a warning in every sink that records them."""
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
    """One line per step: ``{"step", "time", <metric>: number, ..., "spans": {name: [start, stop]}}``.

    A step with warnings also has ``"warnings": [text, ...]``.
    On resume, lines after ``first_step`` move to metrics_dropped.jsonl: these steps are repeated. Unreadable lines move to
    ``metrics.damaged.jsonl``; ``damage`` describes them.
    """

    path: Path
    first_step: int
    damage: str = field(init=False)
    _file: Appended = field(init=False)
    _warnings: list[str] = field(default_factory=list[str], init=False)  # of the next step to log

    def __post_init__(self) -> None:
        retained = keep(self.path, self.first_step) if self.first_step else RetainedLines((), (), "")
        self.damage = retained.note
        partial = self.path.with_suffix(".partial")
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            if retained.damaged:
                with self.path.with_name(DAMAGED).open("ab") as file:
                    file.writelines(line + b"\n" for line in retained.damaged)
            _set_aside(self.path, {*retained.lines, *retained.damaged})
            partial.write_bytes(b"".join(line + b"\n" for line in retained.lines))
            partial.replace(self.path)  # atomic: no other file records the earlier steps
            self._file = Appended(self.path)
        except OSError as error:
            raise ConfigError(f"{self.path} cannot be written ({reason(error)}): move it away, or make room") from error

    def log(self, step: int, values: Mapping[str, float], spans: StepSpans) -> None:
        """Append one line and write it immediately, so that a killed run loses none."""
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
        """Add the warning to the line of the step."""
        del step
        self._warnings.append(str(warning))

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def _set_aside(path: Path, retained: Set[bytes]) -> None:
    """Append the lines of ``path`` that are not ``retained`` to metrics_dropped.jsonl: no logged line is lost."""
    dropped = (
        [line for line in path.read_bytes().split(b"\n") if line.strip() and line not in retained]
        if path.exists()
        else []
    )
    if dropped:
        with path.with_name("metrics_dropped.jsonl").open("ab") as file:
            file.writelines(line + b"\n" for line in dropped)
