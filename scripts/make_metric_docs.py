"""Write docs/metrics.md from the metric dictionary."""

from pathlib import Path

from slime_like.metrics.dictionary import render

Path(__file__).resolve().parents[1].joinpath("docs", "metrics.md").write_text(render())
