"""Report section on a run's collectives: counters per op and process group, summed over the run."""

from __future__ import annotations

import math
from collections.abc import Iterator

from slime_like.report.page import table
from slime_like.report.record import RunRecord

PREFIX = "comm/"
COUNTERS = ("calls", "bytes", "time", "checks", "check_time", "clears", "freed_bytes")
COLUMNS = ("group", "op", "calls", "MiB", "s in the op", "queries", "ms in queries", "clears", "MiB freed")
MIB = 2**20


def collectives(record: RunRecord) -> Iterator[str]:
    """Yield the HTML section on a run's collectives.

    It contains only a note if the run counted no collective (one trainer rank, or ``guard=off``).
    """
    yield "<h2>Collectives</h2>"
    totals: dict[tuple[str, str], dict[str, float]] = {}
    for row in record.rows:
        for name, value in row.values.items():
            group, _, op_counter = name.removeprefix(PREFIX).partition("/")
            op, _, counter = op_counter.rpartition("/")
            if name.startswith(PREFIX) and counter in COUNTERS and math.isfinite(value):
                counters = totals.setdefault((group, op), dict.fromkeys(COUNTERS, 0.0))
                counters[counter] += value
    if not totals:
        yield "<p class=note>the run counted no collective: it had one trainer rank, or guard=off</p>"
        return
    guard_seconds = sum(value for _, value in record.curve("guard/time"))
    step_seconds = sum(value for _, value in record.curve("perf/step_time"))
    share = f", {guard_seconds / step_seconds:.4%} of the time of all steps" if step_seconds > 0 else ""
    yield f"<p>The memory guard took {guard_seconds * 1e3:.2f} ms{share}.</p>"
    slowest = sorted(totals.items(), key=lambda item: -item[1]["time"])
    yield table(COLUMNS, (_cells(*key, counters) for key, counters in slowest), numbers=tuple(range(2, len(COLUMNS))))


def _cells(group: str, op: str, counters: dict[str, float]) -> tuple[str, ...]:
    return (
        group,
        op,
        f"{counters['calls']:.0f}",
        f"{counters['bytes'] / MIB:.2f}",
        f"{counters['time']:.3f}",
        f"{counters['checks']:.0f}",
        f"{counters['check_time'] * 1e3:.2f}",
        f"{counters['clears']:.0f}",
        f"{counters['freed_bytes'] / MIB:.1f}",
    )
