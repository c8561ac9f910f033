"""Where reduced metrics go: metrics.jsonl always; a terminal, tensorboard and wandb when asked for."""

from __future__ import annotations

import json
import os
import secrets
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, TextIO, runtime_checkable

from rich.console import Console

from slime_like.config.run import MetricsConfig
from slime_like.errors import ConfigError
from slime_like.metrics.view import LiveConsole, PlainConsole

Spans = Mapping[str, tuple[float, float]]


class Sink(Protocol):
    """One destination."""

    def log(self, step: int, values: Mapping[str, float], spans: Spans) -> None: ...
    def close(self) -> None: ...


@runtime_checkable
class Watched(Protocol):
    """A sink that people watch while a run goes on."""

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
    """All destinations that ``config`` names.

    ``first_step`` is where a resumed run continues; ``settings`` is what tensorboard and wandb keep beside the curves,
    without prompts. Raises ``ConfigError`` when a library that was asked for is not installed.
    """
    stream = console or sys.stdout
    sinks: list[Sink] = [JsonlSink(run_dir / "metrics.jsonl", first_step)]
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
    return FanOut(sinks)


@dataclass(slots=True)
class FanOut:
    """Hands everything to every sink."""

    sinks: Sequence[Sink]

    def log(self, step: int, values: Mapping[str, float], spans: Spans) -> None:
        """Log one step everywhere."""
        for sink in self.sinks:
            sink.log(step, values, spans)

    def note(self, text: str) -> None:
        """A line for whoever watches; it is no metric, and is kept nowhere."""
        for sink in self.sinks:
            if isinstance(sink, Watched):
                sink.note(text)

    def close(self) -> None:
        """Flush and close everything, each whatever becomes of the others."""
        with ExitStack() as closing:
            for sink in self.sinks:
                closing.callback(sink.close)


@dataclass(slots=True)
class JsonlSink:
    """One line per step: ``{"step", "time", <metric>: number, ..., "spans": {name: [start, stop]}}``.

    On resume, lines after ``first_step`` are dropped: the steps they tell of are taken again.
    """

    path: Path
    first_step: int
    _file: TextIO = field(init=False)

    def __post_init__(self) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        kept = [line for line in self._lines() if _step_of(line) <= self.first_step] if self.first_step else []
        partial = self.path.with_suffix(".partial")
        partial.write_text("".join(line + "\n" for line in kept))
        partial.replace(self.path)  # whole or as it was: the steps before are told nowhere else
        self._file = self.path.open("a")

    def _lines(self) -> list[str]:
        return self.path.read_text().splitlines() if self.path.exists() else []

    def log(self, step: int, values: Mapping[str, float], spans: Spans) -> None:
        """Append one line and flush it: a killed run loses none."""
        row = {"step": step, "time": time.time(), **values, "spans": {name: list(span) for name, span in spans.items()}}
        self._file.write(json.dumps(row) + "\n")
        self._file.flush()

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def _step_of(line: str) -> float:
    """Step of a line; infinity for a torn one, so that it is dropped."""
    try:
        return float(json.loads(line)["step"])
    except (ValueError, KeyError, TypeError):
        return float("inf")


class TensorboardSink:
    """Scalars in tensorboard's event format, by its own writer: torch's would bring torch into every reader of metrics.

    On resume it says from which step on it writes anew, and tensorboard drops what an earlier part wrote of those steps.
    """

    def __init__(self, folder: Path, first_step: int) -> None:
        try:
            from tensorboard.compat.proto import event_pb2, summary_pb2
            from tensorboard.summary.writer.event_file_writer import EventFileWriter
        except ImportError as error:
            raise ConfigError(
                "metrics.tensorboard=true, but tensorboard is not installed: pip install tensorboard"
            ) from error
        events: Any = event_pb2  # protobuf makes their classes at import: a checker sees none
        summaries: Any = summary_pb2
        self._event, self._summary = events.Event, summaries.Summary
        self._writer: Any = EventFileWriter(str(folder))
        start = events.SessionLog(status=events.SessionLog.START)
        self._writer.add_event(
            self._event(step=first_step + (first_step > 0), wall_time=time.time(), session_log=start)
        )

    def log(self, step: int, values: Mapping[str, float], spans: Spans) -> None:
        """One scalar per metric."""
        del spans
        scalars = [self._summary.Value(tag=name, simple_value=value) for name, value in values.items()]
        self._writer.add_event(self._event(step=step, wall_time=time.time(), summary=self._summary(value=scalars)))

    def close(self) -> None:
        """Flush and close."""
        self._writer.close()


class WandbSink:
    """Curves and settings to wandb; offline when there is no key. Never a prompt or a response.

    The run's id lies in the run's folder (``WANDB_RUN_ID`` goes first), so that a run that is resumed goes on as the same
    one. Its steps are a metric of their own, which wandb draws the others over: wandb drops rows whose own step it has
    seen, and a resumed run takes the steps after its checkpoint again.
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
        """One row of metrics."""
        del spans
        self._run.log({**values, "step": step})

    def close(self) -> None:
        """Finish the run."""
        self._run.finish()


def _wandb_id(path: Path, *, resumed: bool) -> str:
    """The id of this run: the user's, the one that its folder keeps, or a new one, which the folder keeps from now on."""
    kept = path.read_text().strip() if resumed and path.is_file() else ""
    chosen = os.environ.get("WANDB_RUN_ID") or kept or secrets.token_hex(4)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(chosen + "\n")
    return chosen
