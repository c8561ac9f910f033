"""Metric sink that writes a few metrics to a CSV file, one row per step. A resumed run replaces the rows of repeated steps.

``python train.py +recipe=quickstart metrics.sinks=[examples/csv_sink.py:CsvSink]`` writes ``runs/quickstart/metrics.csv``.
"""

from __future__ import annotations

import csv
from collections.abc import Mapping
from pathlib import Path

from slime_like.config.schema.run import MetricsConfig
from slime_like.metrics.types import SinkContext, StepSpans

COLUMNS = ("rollout/raw_reward", "train/loss", "perf/step_time")


class CsvSink:
    """Sink that writes ``metrics.csv`` in the run's folder. A resumed run keeps the rows up to the step from which it continues."""

    def __init__(self, config: MetricsConfig, context: SinkContext) -> None:
        del config
        path = context.run_dir / "metrics.csv"
        rows = _rows_until(path, context.first_step)
        self._file = path.open("w", newline="")
        self._writer = csv.writer(self._file)
        self._writer.writerows([("step", *COLUMNS), *rows])
        self._file.flush()

    def log(self, step: int, values: Mapping[str, float], spans: StepSpans) -> None:
        """Write the step and its metrics of ``COLUMNS`` as a row; a metric that the step lacks is an empty cell."""
        del spans
        self._writer.writerow((step, *(values.get(name, "") for name in COLUMNS)))
        self._file.flush()

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def _rows_until(path: Path, step: int) -> list[list[str]]:
    """Return the rows of an existing file up to ``step``."""
    if not step or not path.is_file():
        return []
    with path.open(newline="") as file:
        return [row for row in csv.reader(file) if row and row[0].isdecimal() and int(row[0]) <= step]
