"""The example of a metric sink writes what a run logs."""

from __future__ import annotations

import io
from pathlib import Path

from slime_like.config.schema.run import MetricsConfig
from slime_like.metrics.sinks import open_sinks

CONFIG = MetricsConfig(console="off", sinks=["examples/csv_sink.py:CsvSink"])


HEADER = "step,rollout/raw_reward,train/loss,perf/step_time"


def log(folder: Path, first_step: int, *steps: int) -> list[str]:
    """Log ``steps`` in a run that continues from ``first_step``, and return the lines of the file."""
    sinks = open_sinks(CONFIG, folder, first_step=first_step, num_steps=4, console=io.StringIO())
    for step in steps:
        sinks.log(step, {"rollout/raw_reward": 0.5, "train/loss": -0.25 * step - first_step}, {})
    sinks.close()
    return (folder / "metrics.csv").read_text().splitlines()


def test_a_resumed_run_replaces_the_rows_of_repeated_steps(tmp_path: Path) -> None:
    assert log(tmp_path, 0, 1, 2) == [HEADER, "1,0.5,-0.25,", "2,0.5,-0.5,"]
    assert log(tmp_path, 1, 2, 3) == [HEADER, "1,0.5,-0.25,", "2,0.5,-1.5,", "3,0.5,-1.75,"]
    assert log(tmp_path, 0, 1) == [HEADER, "1,0.5,-0.25,"]


def test_a_sink_that_is_added_when_a_run_resumes_writes_the_header(tmp_path: Path) -> None:
    assert log(tmp_path, 2, 3) == [HEADER, "3,0.5,-2.75,"]
