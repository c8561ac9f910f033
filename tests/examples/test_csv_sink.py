"""The example of a metric sink writes what a run logs."""

from __future__ import annotations

import io
from pathlib import Path

from slime_like.config.schema.run import MetricsConfig
from slime_like.metrics.sinks import open_sinks

CONFIG = MetricsConfig(console="off", sinks=["examples/csv_sink.py:CsvSink"])


def test_a_row_per_step_and_a_resumed_run_appends(tmp_path: Path) -> None:
    for first, step in ((0, 1), (1, 2)):
        sinks = open_sinks(CONFIG, tmp_path, first_step=first, num_steps=2, console=io.StringIO())
        sinks.log(step, {"rollout/raw_reward": 0.5, "train/loss": -0.25 * step}, {})
        sinks.close()
    rows = (tmp_path / "metrics.csv").read_text().splitlines()
    assert rows == ["step,rollout/raw_reward,train/loss,perf/step_time", "1,0.5,-0.25,", "2,0.5,-0.5,"]
