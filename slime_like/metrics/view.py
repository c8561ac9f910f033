"""Console output of a run: a live table for terminals, or a line per step."""

from __future__ import annotations

import re
import time
from collections import deque
from collections.abc import Callable, Mapping
from typing import TextIO

from rich.console import Console
from rich.live import Live
from rich.table import Table
from rich.text import Text

from slime_like.printable import visible

FURTHER_METRIC = re.compile(
    r"(-truncated_ratio|-pass@\d+|/response_len/\w+)$"
)  # suffix of a dataset's metric besides its score
MAX_ROWS = 12
MAX_NOTES = 4
PHASES = ("train_wait", "train", "update_weights", "eval")
COLUMNS = (
    ("reward", "rollout/raw_reward", "{:.3f}"),
    ("accuracy", "rollout/accuracy", "{:.3f}"),
    ("length", "rollout/response_len/mean", "{:.1f}"),
    ("tok/s", "perf/tokens_per_gpu_per_sec", "{:.0f}"),
    ("loss", "train/loss", "{:.4f}"),
    ("grad", "train/grad_norm", "{:.2f}"),
    ("|dlogp|", "train/train_rollout_logprob_abs_diff_max", "{:.1e}"),
    ("s/step", "perf/step_time", "{:.2f}"),
)


def cells(values: Mapping[str, float]) -> list[str]:
    """Return the table row of one step; ``-`` for missing metrics."""
    return [form.format(values[name]) if name in values else "-" for _, name, form in COLUMNS]


def evaluations(values: Mapping[str, float]) -> dict[str, float]:
    """Return the scores of a step by dataset: its metrics ``eval/<dataset>``.

    Further metrics of these datasets, such as ``eval/<dataset>-truncated_ratio``, are left out.
    """
    scores = {name.removeprefix("eval/"): value for name, value in values.items() if name.startswith("eval/")}
    return {
        name: value
        for name, value in scores.items()
        if not ((suffix := FURTHER_METRIC.search(name)) and name[: suffix.start()] in scores)
    }


def time_split(values: Mapping[str, float]) -> str:
    """Return text with the percentage of each of ``PHASES`` in their total time. Phases that took no time are left out."""
    seconds = {phase: values.get(f"perf/{phase}_time", 0.0) for phase in PHASES}
    total = sum(seconds.values()) or 1.0
    return ", ".join(f"{phase} {100 * phase_s / total:.0f}%" for phase, phase_s in seconds.items() if phase_s)


class PlainConsole:
    """Sink that prints a line per step."""

    def __init__(self, stream: TextIO, num_steps: int) -> None:
        self._stream = stream
        self._num_steps = num_steps

    def log(self, step: int, values: Mapping[str, float], spans: Mapping[str, tuple[float, float]]) -> None:
        """Print a line with the metrics of ``COLUMNS`` and evaluation scores, if there are any. For step 0, print only scores."""
        del spans
        parts = [f"{title} {cell}" for (title, _, _), cell in zip(COLUMNS, cells(values), strict=True) if cell != "-"]
        if step == 0:  # before training, print evaluations only
            parts = []
        parts += [f"eval/{name} {value:.3f}" for name, value in evaluations(values).items()]
        if not parts:
            return
        self._stream.write(visible(f"[{step}/{self._num_steps}] {'  '.join(parts)}\n"))
        self._stream.flush()

    def note(self, text: str) -> None:
        """Print ``text`` on a separate line."""
        self._stream.write(visible(f"{text}\n"))
        self._stream.flush()

    def close(self) -> None:
        """Do nothing: there is nothing to release."""


class LiveConsole:
    """Sink that shows a live table of the last steps.

    Below the table are evaluations, each phase's share of the last step's time, the remaining time and the last notes.
    """

    def __init__(
        self, console: Console, first_step: int, num_steps: int, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._first_step = first_step
        self._num_steps = num_steps
        self._rows: deque[tuple[int, list[str]]] = deque(maxlen=MAX_ROWS)
        self._evals: dict[str, list[float]] = {}
        self._notes: deque[str] = deque(maxlen=MAX_NOTES)
        self._time_split = ""
        self._clock = clock
        self._start_time: float | None = None
        self._last_step = first_step
        self._live = Live(console=console, auto_refresh=False)

    def log(self, step: int, values: Mapping[str, float], spans: Mapping[str, tuple[float, float]]) -> None:
        """Add a step to the table and redraw it."""
        del spans
        if self._start_time is None:
            self._start_time = self._clock()
            self._first_step = step
        self._last_step = step
        self._rows.append((step, cells(values)))
        for name, value in evaluations(values).items():
            self._evals.setdefault(name, []).append(value)
        self._time_split = time_split(values)
        self._show()

    def note(self, text: str) -> None:
        """Add a line of text below the table and redraw it."""
        self._notes.append(text)
        self._show()

    def _show(self) -> None:
        if not self._live.is_started:
            self._live.start()
        self._live.update(self._table(self._last_step), refresh=True)

    def _table(self, step: int) -> Table:
        table = Table(caption=self._caption(step), caption_justify="left")
        table.add_column("step", justify="right")
        for title, _, _ in COLUMNS:
            table.add_column(title, justify="right")
        for number, row in self._rows:
            table.add_row(f"{number}/{self._num_steps}", *row)
        return table

    def _caption(self, step: int) -> Text:
        lines = [
            f"eval/{name}: {' -> '.join(f'{v:.3f}' for v in history[-6:])}" for name, history in self._evals.items()
        ]
        if self._time_split:
            lines.append(self._time_split)
        steps = step - self._first_step
        if steps > 0 and self._start_time is not None:
            seconds = (self._clock() - self._start_time) / steps * (self._num_steps - step)
            lines.append(f"about {seconds / 60:.1f} min left")
        return Text(visible("\n".join([*lines, *self._notes])))  # no markup: dataset and file names come from users

    def close(self) -> None:
        """Stop updating; the last table stays on the screen."""
        self._live.stop()
