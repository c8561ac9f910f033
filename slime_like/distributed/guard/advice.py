"""Table and guard policy derived from the memory that each op took on each rank (``guard.profile``).

This module does not import torch.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Set
from dataclasses import dataclass
from pathlib import Path

from slime_like.config.schema.collectives import OPS
from slime_like.util.reading import InputFile

MIB = 2**20
# Noise of the measurement: the driver allocates in pieces of 2 MiB, and resident memory fluctuates.
NOISE = 2 * MIB
MIN_THRESHOLD = 256 * MIB
MAX_QUERY_SHARE = 0.001  # a query may run before each call of an op if it takes at most this share of the op's time


@dataclass(frozen=True, slots=True)
class MeasuredOp:
    """Memory that one op in one group took on one rank, in bytes.

    ``*_driver``: drop of free memory. ``*_allocator``: growth of the memory that the process holds. ``first_*``: maximum over
    the first call and each call with a larger payload than any call before it. ``later_*``: maximum over all other calls.
    """

    op: str
    group: str
    source: str  # driver | allocator | host
    calls: int
    num_bytes: int  # payload of all calls
    time_ns: int  # time of all calls
    query_ns: int  # time of one query of free memory
    first_allocator: int
    first_driver: int
    later_allocator: int
    later_driver: int


@dataclass(frozen=True, slots=True)
class Advice:
    """A policy for one op, and its reason."""

    op: str
    checks: str
    reason: str


def write_rows(path: Path, rows: Iterable[MeasuredOp]) -> None:
    """Write one rank's measurements to ``path`` atomically."""
    path.parent.mkdir(parents=True, exist_ok=True)
    scratch = path.with_suffix(".tmp")
    scratch.write_text(json.dumps([dataclasses.asdict(row) for row in rows]))
    scratch.rename(path)


def read_rows(folder: Path) -> dict[str, list[MeasuredOp]]:
    """Read the files that ``write_rows`` wrote to ``folder``. Return each rank's measurements by the name of its file.

    Raises ``DataError`` if a file cannot be read, is damaged, or lacks a field of ``MeasuredOp``.
    """
    files = [InputFile(path, fix=f"remove {folder} and profile again") for path in sorted(folder.glob("*.json"))]
    return {file.path.stem: file.typed(file.json(), list[MeasuredOp]) for file in files}


def table(ranks: Mapping[str, list[MeasuredOp]]) -> Iterator[str]:
    """Yield a Markdown table with a row per op and kind of group.

    Memory drops (MiB) and query durations (us, each the mean of a rank) are maxima over all ranks. Calls are summed over all
    ranks, and bytes per call are the mean over these calls. The column ``ranks`` counts each rank once, even if it has several
    groups of a kind.
    """
    columns = (
        "first use: allocator drop | first use: driver drop | steady state: allocator drop | steady state: driver drop"
    )
    yield f"| op | group | ranks | calls | bytes per call | {columns} | query us |"
    yield "|---|---|---|---|---|---|---|---|---|---|"
    for (op, group), rows in sorted(_group_by(ranks, lambda row: (row.op, row.group)).items()):
        maxima = _maxima(rows)
        num_ranks = sum(any((row.op, row.group) == (op, group) for row in rank_rows) for rank_rows in ranks.values())
        calls = sum(row.calls for row in rows)
        size = sum(row.num_bytes for row in rows) / calls
        drops = (maxima.first_allocator, maxima.first_driver, maxima.later_allocator, maxima.later_driver)
        sizes = " | ".join(f"{drop / MIB:.2f}" for drop in drops)
        yield f"| {op} | {group} | {num_ranks} | {calls} | {size:.0f} | {sizes} | {maxima.query_ns / 1e3:.1f} |"


def advise(ranks: Mapping[str, list[MeasuredOp]]) -> list[Advice]:
    """Return one policy for each measured op, derived from its calls in all groups on all ranks."""
    recommendations: list[Advice] = []
    for (op,), rows in sorted(_group_by(ranks, lambda row: (row.op,)).items()):
        maxima, calls = _maxima(rows), sum(row.calls for row in rows)
        first, later = _first_drop(maxima), _later_drop(maxima)
        share = maxima.query_ns * calls / max(1, sum(row.time_ns for row in rows))
        if first <= NOISE and later <= NOISE:
            checks, reason = "never", f"takes no memory: at most {_mib(max(first, later))} in {calls} calls"
        elif later <= NOISE:
            checks, reason = (
                "auto",
                f"the first use of a size takes {_mib(first)}, no later one of {calls} calls more than {_mib(later)}",
            )
        elif share <= MAX_QUERY_SHARE:
            reason = f"a later call took {_mib(later)}; a query before each is {share:.2%} of the op's own time"
            checks = "below"
        else:
            reason = f"a later call took {_mib(later)}; a query before each would be {share:.1%} of the op's own time"
            checks = "auto"
        recommendations.append(Advice(op, checks, reason))
    return recommendations


def threshold(ranks: Mapping[str, list[MeasuredOp]]) -> tuple[int, str]:
    """Return the threshold in MiB (twice the largest drop of any op, at least ``MIN_THRESHOLD``) and the reason for it."""
    rows = [row for rank_rows in ranks.values() for row in rank_rows]
    largest = max(rows, key=lambda row: max(_first_drop(row), _later_drop(row)))
    max_drop = max(_first_drop(largest), _later_drop(largest))
    if 2 * max_drop <= MIN_THRESHOLD:
        return MIN_THRESHOLD // MIB, f"no op took more than {_mib(max_drop)}"
    use = "at its first use" if _first_drop(largest) == max_drop else "at a later call"
    reason = f"twice the {_mib(max_drop)} that {largest.op} took in group {largest.group} {use}"
    return -(-2 * max_drop // MIB), reason


def to_yaml(ranks: Mapping[str, list[MeasuredOp]], origin: str) -> str:
    """Return the content of a YAML file for the config group ``guard``. ``origin`` describes the measured run."""
    size, reason = threshold(ranks)
    lines = [
        f"# Measured by scripts/profile_comm.py: {origin}.",
        "checks: auto",
        f"threshold: {size}MiB  # {reason}",
        "ops:",
    ]
    for advice in [*(measured_advice := advise(ranks)), *_advise_unmeasured({advice.op for advice in measured_advice})]:
        lines += [f"  {advice.op}: {advice.checks}  # {advice.reason}"]
    return "\n".join(lines) + "\n"


def _advise_unmeasured(measured_ops: Set[str]) -> Iterator[Advice]:
    """Yield ``auto`` for every op that is not in ``measured_ops``."""
    for op in OPS:
        if op.name not in measured_ops:
            yield Advice(op.name, "auto", "not measured: the op did not occur")


def _group_by[K: tuple[str, ...]](
    ranks: Mapping[str, list[MeasuredOp]], key: Callable[[MeasuredOp], K]
) -> dict[K, list[MeasuredOp]]:
    grouped: dict[K, list[MeasuredOp]] = {}
    for rows in ranks.values():
        for row in rows:
            grouped.setdefault(key(row), []).append(row)
    return grouped


def _maxima(rows: list[MeasuredOp]) -> MeasuredOp:
    names = ("query_ns", "first_allocator", "first_driver", "later_allocator", "later_driver")
    return dataclasses.replace(rows[0], **{name: max(getattr(row, name) for row in rows) for name in names})


def _first_drop(row: MeasuredOp) -> int:
    """Return the bytes that the op took at first use.

    On a GPU, this is the growth of the process's memory or, if larger, the drop of free memory. On the host, it is the growth
    alone, because other processes also change the free memory.
    """
    return row.first_allocator if row.source == "host" else max(row.first_allocator, row.first_driver)


def _later_drop(row: MeasuredOp) -> int:
    return row.later_allocator if row.source == "host" else max(row.later_allocator, row.later_driver)


def _mib(num_bytes: int) -> str:
    return f"{num_bytes / MIB:.1f} MiB"
