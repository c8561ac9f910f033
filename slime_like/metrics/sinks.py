"""Sinks of reduced metrics: metrics.jsonl always; console, tensorboard and wandb if configured."""

from __future__ import annotations

import json
import os
import re
import secrets
import sys
import time
from collections.abc import Mapping, Sequence, Set
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, TextIO, runtime_checkable

from rich.console import Console

from slime_like.config.schema.run import MetricsConfig
from slime_like.errors import ConfigError
from slime_like.metrics.appended import Appended
from slime_like.metrics.log import DAMAGED, RetainedLines, keep
from slime_like.metrics.types import RunWarning
from slime_like.metrics.view import LiveConsole, PlainConsole
from slime_like.util.reading import InputFile, reason, shown

Spans = Mapping[str, tuple[float, float]]


class Sink(Protocol):
    """One destination."""

    def log(self, step: int, values: Mapping[str, float], spans: Spans) -> None: ...
    def close(self) -> None: ...


@runtime_checkable
class KeepsWarnings(Protocol):
    """A sink that records the run's warnings."""

    def warn(self, step: int, warning: RunWarning) -> None: ...


@runtime_checkable
class Watched(Protocol):
    """A sink that displays notes during a run."""

    def note(self, text: str) -> None: ...


def open_sinks(
    config: MetricsConfig,
    run_dir: Path,
    *,
    first_step: int,
    num_steps: int,
    settings: Mapping[str, Any] | None = None,
    console: TextIO | None = None,
) -> FanOut:
    """Open all sinks of ``config``.

    ``first_step`` is the step a resumed run continues from; ``settings`` are stored by wandb with the curves and contain
    no prompts. Raises ``ConfigError`` if a required library is not installed.
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
    if config.tensorboard:
        sinks.append(TensorboardSink(run_dir / "tensorboard", first_step))
    if config.wandb:
        sinks.append(WandbSink(config, run_dir, settings or {}, resumed=first_step > 0))
    out = FanOut(sinks)
    if log.damage:
        out.note(log.damage)
    return out


@dataclass(slots=True)
class FanOut:
    """Forward everything to every sink."""

    sinks: Sequence[Sink]

    def log(self, step: int, values: Mapping[str, float], spans: Spans) -> None:
        """Log one step to every sink."""
        for sink in self.sinks:
            sink.log(step, values, spans)

    def note(self, text: str) -> None:
        """Display a line of text; it is not recorded."""
        for sink in self.sinks:
            if isinstance(sink, Watched):
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

    def log(self, step: int, values: Mapping[str, float], spans: Spans) -> None:
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


class TensorboardSink:
    """Scalars in tensorboard's event format, by tensorboard's writer: torch's would import torch into the metrics package.

    On resume it records its first step, and tensorboard drops earlier values of the repeated steps.
    """

    def __init__(self, folder: Path, first_step: int) -> None:
        try:
            from tensorboard.compat.proto import event_pb2, summary_pb2
            from tensorboard.summary.writer.event_file_writer import EventFileWriter
        except ImportError as error:
            raise ConfigError(
                "metrics.tensorboard=true, but tensorboard is not installed: pip install tensorboard"
            ) from error
        events: Any = event_pb2  # protobuf creates these classes at import: invisible to a type checker
        summaries: Any = summary_pb2
        self._event, self._summary = events.Event, summaries.Summary
        self._writer: Any = EventFileWriter(str(folder))
        start = events.SessionLog(status=events.SessionLog.START)
        self._writer.add_event(
            self._event(step=first_step + (first_step > 0), wall_time=time.time(), session_log=start)
        )

    def log(self, step: int, values: Mapping[str, float], spans: Spans) -> None:
        """Write one scalar per metric."""
        del spans
        scalars = [self._summary.Value(tag=name, simple_value=value) for name, value in values.items()]
        self._writer.add_event(self._event(step=step, wall_time=time.time(), summary=self._summary(value=scalars)))

    def close(self) -> None:
        """Flush and close."""
        self._writer.close()


class WandbSink:
    """Curves and settings to wandb; offline without an API key. Never sends prompts or responses.

    The run id is stored in the run folder (``WANDB_RUN_ID`` has precedence), so a resumed run continues the same wandb
    run. Steps are logged as a metric and used as x axis: wandb drops rows whose internal step it has already seen, and a
    resumed run repeats the steps after its checkpoint.
    """

    def __init__(self, config: MetricsConfig, run_dir: Path, settings: Mapping[str, Any], *, resumed: bool) -> None:
        try:
            import wandb
        except ImportError as error:
            raise ConfigError("metrics.wandb=true, but wandb is not installed: pip install wandb") from error
        offline = not os.environ.get("WANDB_API_KEY") and "WANDB_MODE" not in os.environ
        self._run = wandb.init(
            project=config.wandb_project,
            group=config.wandb_group,
            name=run_dir.name,
            id=_wandb_id(run_dir / "wandb" / "run_id", resumed=resumed),
            resume="allow",
            dir=str(run_dir),
            config=dict(settings),
            mode="offline" if offline else None,
            settings=wandb.Settings(save_code=False, disable_git=True, console="off"),
        )
        self._run.define_metric("step")
        self._run.define_metric("*", step_metric="step")

    def log(self, step: int, values: Mapping[str, float], spans: Spans) -> None:
        """Log one row of metrics."""
        del spans
        self._run.log({**values, "step": step})

    def warn(self, step: int, warning: RunWarning) -> None:
        """Raise an alert, without the quoted sample."""
        self._run.alert(title="slime_like", text=f"step {step}: {warning.text}", level="WARN")

    def close(self) -> None:
        """Finish the run."""
        self._run.finish()


def _wandb_id(path: Path, *, resumed: bool) -> str:
    """Return the wandb id of this run: the user's, the stored one, or a new one; store it in the run folder."""
    stored = InputFile(path, ConfigError, "remove it").text().strip() if resumed and path.is_file() else ""
    if stored and not re.fullmatch(r"[\w-]{1,64}", stored):
        raise ConfigError(f"{path} holds {shown(stored)}, which is no id of a wandb run: correct it, or remove it")
    chosen = os.environ.get("WANDB_RUN_ID") or stored or secrets.token_hex(4)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(chosen + "\n")
    return chosen
