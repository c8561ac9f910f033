"""Comparison of two runs as text for a terminal and as an HTML page."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from fnmatch import fnmatchcase
from typing import TextIO

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from slime_like.metrics import dictionary
from slime_like.printable import visible
from slime_like.report.chart import Series, chart, number
from slime_like.report.comparison import Comparison, Divergence
from slime_like.report.page import html, page, table
from slime_like.util.counted import counted

BARS = "▁▂▃▄▅▆▇█"
SPARK_WIDTH = 24


def plain(text: str) -> str:
    """Escape rich's markup and the characters that ``visible`` escapes."""
    return escape(visible(text))


def select_metrics(comparison: Comparison, patterns: Sequence[str]) -> list[Divergence]:
    """Return the metrics that match one of ``patterns`` (shell patterns); all metrics if there are no patterns."""
    return [
        m for m in comparison.metrics if not patterns or any(fnmatchcase(m.metric, pattern) for pattern in patterns)
    ]


def spark(values: Sequence[float], low: float, high: float) -> str:
    """Return a curve as one line of at most ``SPARK_WIDTH`` bars, scaled to ``[low, high]``."""
    width = min(SPARK_WIDTH, len(values))
    sampled = [values[index * (len(values) - 1) // max(1, width - 1)] for index in range(width)]
    span = high - low

    def bar(value: float) -> str:
        if not math.isfinite(value):
            return "·"
        return BARS[round((value - low) / span * (len(BARS) - 1)) if span > 0 and math.isfinite(span) else 0]

    return "".join(map(bar, sampled))


def print_comparison(comparison: Comparison, patterns: Sequence[str], stream: TextIO) -> None:
    """Print to ``stream`` the summary, curves and first differences of the selected metrics, and config keys that differ.

    ``patterns`` selects the metrics, see ``select_metrics``.
    """
    console = Console(file=stream, highlight=False)
    for line in summary(comparison):
        console.print(plain(line))
    curves = Table(box=None, pad_edge=False, header_style="dim")
    for name in ("metric", "A", "", "B", "", "first difference", "largest"):
        curves.add_column(name, overflow="fold")
    for metric in select_metrics(comparison, patterns):
        curves.add_row(*(plain(cell) for cell in _cells(metric)))
    console.print(curves)
    if comparison.config:
        keys = Table(box=None, pad_edge=False, header_style="dim")
        for name in ("key", "A", "B"):
            keys.add_column(name, overflow="fold")
        for key, value_a, value_b in comparison.config:
            keys.add_row(plain(key), plain(repr(value_a)), plain(repr(value_b)))
        console.print()
        console.print(keys)


def summary(comparison: Comparison) -> Iterator[str]:
    """Yield the lines of the summary: both runs, first difference, metrics of one run only, number of differing config keys."""
    for letter, run in (("A", comparison.a), ("B", comparison.b)):
        yield f"{letter}: {run.name} ({run.folder}), steps {run.rows[0].step} to {run.rows[-1].step}"
        yield from (f"   {note}" for note in run.notes)
    tolerance = f"|a - b| <= {comparison.absolute:g} + {comparison.relative:g} * max(|a|, |b|)"
    same = sum(metric.step is None and metric.num_common > 0 for metric in comparison.metrics)
    if comparison.first is None:
        yield f"equal at every common step within {tolerance}: {counted(same, 'metric')}"
    else:
        names = [metric.metric for metric in comparison.metrics if metric.step == comparison.first.step]
        suffix = f" and {len(names) - 4} more" if len(names) > 4 else ""
        yield f"first difference at step {comparison.first.step}: {', '.join(names[:4])}{suffix} (tolerance {tolerance}; equal: {counted(same, 'metric')})"
    for letter, one_sided in zip("AB", comparison.only, strict=True):
        if one_sided:
            yield f"only {letter} has {', '.join(one_sided)}"
    yield f"different values: {counted(len(comparison.config), 'configuration key')}"


def html_page(comparison: Comparison, patterns: Sequence[str]) -> str:
    """Return a self-contained page: summary, curves and first differences of the selected metrics, and config keys that differ.

    ``patterns`` selects the metrics, see ``select_metrics``.
    """
    return page(f"{comparison.a.name} and {comparison.b.name}", _body(comparison, patterns))


def _body(comparison: Comparison, patterns: Sequence[str]) -> Iterator[str]:
    yield f"<h1>{html(comparison.a.name)} and {html(comparison.b.name)}</h1>"
    yield from (f"<p>{html(line)}</p>" for line in summary(comparison))
    metrics = select_metrics(comparison, patterns)
    yield '<h2>Curves</h2><div class="grid-of-charts">'
    for metric in metrics:
        unit = next((entry.unit for entry in dictionary.ENTRIES if entry.matches(metric.metric)), "")
        note = (
            ""
            if metric.step is None
            else f"first difference at step {metric.step}: {' and '.join(map(repr, metric.values))}"
        )
        lines = [Series(f"A {comparison.a.name}", metric.a, 0), Series(f"B {comparison.b.name}", metric.b, 1)]
        yield chart(metric.metric, lines, unit=unit, note=note, mark=metric.step)
    yield "</div><h2>First differences</h2>"
    yield table(
        ("metric", "common steps", "first difference", "value of A", "value of B", "largest |A - B|"),
        (
            (
                m.metric,
                m.num_common,
                "none" if m.step is None else m.step,
                *(("", "") if m.step is None else m.values),
                number(m.largest),
            )
            for m in metrics
        ),
        numbers=(1, 2, 3, 4, 5),
    )
    yield "<h2>Configuration</h2>"
    yield table(("key", "A", "B"), ((key, repr(value_a), repr(value_b)) for key, value_a, value_b in comparison.config))


def _cells(metric: Divergence) -> Iterator[str]:
    all_values = [y for _, y in (*metric.a, *metric.b) if math.isfinite(y)]
    low, high = (min(all_values), max(all_values)) if all_values else (0.0, 0.0)
    yield metric.metric
    for points in (metric.a, metric.b):
        values = [y for _, y in points]
        yield f"{number(values[0])} → {number(values[-1])}"
        yield spark(values, low, high)
    if not metric.num_common:
        yield "no common step"
    elif metric.step is None:
        yield "none"
    else:
        yield f"step {metric.step}: {metric.values[0]:.9g}, {metric.values[1]:.9g}"
    yield number(metric.largest)
