"""Metric sink that writes a few metrics to a CSV file, one row per step.

``python train.py +recipe=quickstart metrics.sinks=[examples/csv_sink.py:CsvSink]`` writes ``runs/quickstart/metrics.csv``.
"""

from __future__ import annotations

import csv
from collections.abc import Mapping

from slime_like.config.schema.run import MetricsConfig
from slime_like.metrics.types import SinkContext, StepSpans

COLUMNS = ("rollout/raw_reward", "train/loss", "perf/step_time")


class CsvSink:
    """Sink that writes ``metrics.csv`` in the run's folder. A resumed run appends to it."""

    def __init__(self, config: MetricsConfig, context: SinkContext) -> None:
        del config
        self._file = (context.run_dir / "metrics.csv").open("a" if context.first_step else "w", newline="")
        self._writer = csv.writer(self._file)
        if not context.first_step:
            self._writer.writerow(("step", *COLUMNS))

    def log(self, step: int, values: Mapping[str, float], spans: StepSpans) -> None:
        """Write the step and its metrics of ``COLUMNS`` as a row; a metric that the step lacks is an empty cell."""
        del spans
        self._writer.writerow((step, *(values.get(name, "") for name in COLUMNS)))
        self._file.flush()

    def close(self) -> None:
        """Close the file."""
        self._file.close()
