"""A run's collectives: what the ranks' wrapper counted of each op in each process group, summed over the run."""

from __future__ import annotations

import math
from collections.abc import Iterator

from slime_like.report.page import table
from slime_like.report.record import RunRecord

PREFIX = "comm/"
COUNTED = ("calls", "bytes", "time", "checks", "check_time", "clears", "freed_bytes")
COLUMNS = ("group", "op", "calls", "MiB", "s in the op", "questions", "ms asking", "clears", "MiB freed")
MIB = 2**20


def collectives(record: RunRecord) -> Iterator[str]:
    """The section of the page; of a run with one rank or ``guard=off`` that nothing was counted."""
    yield "<h2>Collectives</h2>"
    totals: dict[tuple[str, str], dict[str, float]] = {}
    for row in record.rows:
        for name, value in row.values.items():
            group, _, rest = name.removeprefix(PREFIX).partition("/")
            op, _, what = rest.rpartition("/")
            if name.startswith(PREFIX) and what in COUNTED and math.isfinite(value):
                found = totals.setdefault((group, op), dict.fromkeys(COUNTED, 0.0))
                found[what] += value
    if not totals:
        yield "<p class=note>none was counted: one trainer rank, or guard=off</p>"
        return
    asked = sum(value for _, value in record.curve("guard/time"))
    whole = sum(value for _, value in record.curve("perf/step_time"))
    share = f", {asked / whole:.4%} of the steps" if whole > 0 else ""
    yield f"<p>The memory guard took {asked * 1e3:.2f} ms in all{share}.</p>"
    slowest = sorted(totals.items(), key=lambda item: -item[1]["time"])
    yield table(COLUMNS, (_cells(*key, found) for key, found in slowest), numbers=tuple(range(2, len(COLUMNS))))


def _cells(group: str, op: str, found: dict[str, float]) -> tuple[str, ...]:
    return (
        group,
        op,
        f"{found['calls']:.0f}",
        f"{found['bytes'] / MIB:.2f}",
        f"{found['time']:.3f}",
        f"{found['checks']:.0f}",
        f"{found['check_time'] * 1e3:.2f}",
        f"{found['clears']:.0f}",
        f"{found['freed_bytes'] / MIB:.1f}",
    )
