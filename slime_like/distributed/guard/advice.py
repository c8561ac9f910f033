"""Table and guard policy from the measured memory of every op on every rank, with a reason per op. Torch-free."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Set
from dataclasses import dataclass
from pathlib import Path

from slime_like.config.schema.collectives import OPS

MIB = 2**20
# Noise of the measurement: a driver allocates in pieces of 2 MiB, resident memory fluctuates.
NOISE = 2 * MIB
LEAST_THRESHOLD = 256 * MIB
CHEAP = 0.001  # a query below this share of an op's time may run before each call


@dataclass(frozen=True, slots=True)
class MeasuredOp:
    """One op in one group on one rank, in bytes.

    ``first``: maximum over the first call and calls with a larger payload than any before; ``later``: over all others.
    """

    op: str
    group: str
    source: str  # driver | allocator | host
    calls: int
    num_bytes: int
    time_ns: int  # in the op
    question_ns: int  # of one query of free memory
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
    """Write a rank's rows atomically."""
    path.parent.mkdir(parents=True, exist_ok=True)
    scratch = path.with_suffix(".tmp")
    scratch.write_text(json.dumps([dataclasses.asdict(row) for row in rows]))
    scratch.rename(path)


def read_rows(folder: Path) -> dict[str, list[MeasuredOp]]:
    """Return the rows of each rank."""
    return {
        path.stem: [MeasuredOp(**row) for row in json.loads(path.read_text())] for path in sorted(folder.glob("*.json"))
    }


def table(ranks: Mapping[str, list[MeasuredOp]]) -> Iterator[str]:
    """Yield a table row per op and kind of group: the maximum over all ranks; sizes in MiB."""
    columns = "first use: allocator drop | driver drop | steady state: allocator drop | driver drop"
    yield f"| op | group | ranks | calls | bytes per call | {columns} | query us |"
    yield "|---|---|---|---|---|---|---|---|---|---|"
    for (op, group), rows in sorted(_by(ranks, lambda row: (row.op, row.group)).items()):
        worst = _worst(rows)
        calls = sum(row.calls for row in rows)
        size = sum(row.num_bytes for row in rows) / calls
        drops = (worst.first_allocator, worst.first_driver, worst.later_allocator, worst.later_driver)
        sizes = " | ".join(f"{drop / MIB:.2f}" for drop in drops)
        yield f"| {op} | {group} | {len(rows)} | {calls} | {size:.0f} | {sizes} | {worst.question_ns / 1e3:.1f} |"


def advise(ranks: Mapping[str, list[MeasuredOp]]) -> list[Advice]:
    """Return a policy for each measured op, over all groups and ranks."""
    advices: list[Advice] = []
    for (op,), rows in sorted(_by(ranks, lambda row: (row.op,)).items()):
        worst, calls = _worst(rows), sum(row.calls for row in rows)
        first, later = _first(worst), _later(worst)
        share = worst.question_ns * calls / max(1, sum(row.time_ns for row in rows))
        if first <= NOISE and later <= NOISE:
            checks, reason = "never", f"takes no memory: at most {_mib(max(first, later))} in {calls} calls"
        elif later <= NOISE:
            checks, reason = (
                "auto",
                f"the first use of a size takes {_mib(first)}, no later one of {calls} calls more than {_mib(later)}",
            )
        elif share <= CHEAP:
            reason = f"a later call took {_mib(later)}; a query before each is {share:.2%} of the op's own time"
            checks = "below"
        else:
            reason = f"a later call took {_mib(later)}; a query before each would be {share:.1%} of the op's own time"
            checks = "auto"
        advices.append(Advice(op, checks, reason))
    return advices


def threshold(ranks: Mapping[str, list[MeasuredOp]]) -> tuple[int, str]:
    """Return the threshold in MiB and its reason: twice the largest drop of any op."""
    rows = [row for rank_rows in ranks.values() for row in rank_rows]
    hungriest = max(rows, key=lambda row: max(_first(row), _later(row)))
    max_drop = max(_first(hungriest), _later(hungriest))
    if 2 * max_drop <= LEAST_THRESHOLD:
        return LEAST_THRESHOLD // MIB, f"no op took more than {_mib(max_drop)}"
    use = "at its first use" if _first(hungriest) == max_drop else "at a later call"
    return -(
        -2 * max_drop // MIB
    ), f"twice the {_mib(max_drop)} that {hungriest.op} took in group {hungriest.group} {use}"


def to_yaml(ranks: Mapping[str, list[MeasuredOp]], origin: str) -> str:
    """Return a YAML file for the config group ``guard``."""
    size, reason = threshold(ranks)
    lines = [
        f"# Measured by scripts/profile_comm.py: {origin}.",
        "checks: auto",
        f"threshold: {size}MiB  # {reason}",
        "ops:",
    ]
    for advice in [*(measured := advise(ranks)), *_unmeasured({advice.op for advice in measured})]:
        lines += [f"  {advice.op}: {advice.checks}  # {advice.reason}"]
    return "\n".join(lines) + "\n"


def _unmeasured(measured: Set[str]) -> Iterator[Advice]:
    """Yield ``auto`` for every other op."""
    for op in OPS:
        if op.name not in measured:
            yield Advice(op.name, "auto", "not seen: nothing is known of what it takes")


def _by[K: tuple[str, ...]](
    ranks: Mapping[str, list[MeasuredOp]], key: Callable[[MeasuredOp], K]
) -> dict[K, list[MeasuredOp]]:
    grouped: dict[K, list[MeasuredOp]] = {}
    for rows in ranks.values():
        for row in rows:
            grouped.setdefault(key(row), []).append(row)
    return grouped


def _worst(rows: list[MeasuredOp]) -> MeasuredOp:
    names = ("question_ns", "first_allocator", "first_driver", "later_allocator", "later_driver")
    return dataclasses.replace(rows[0], **{name: max(getattr(row, name) for row in rows) for name in names})


def _first(row: MeasuredOp) -> int:
    """Return the drop at first use. On a host only this process's memory counts: free memory is shared by all processes."""
    return row.first_allocator if row.source == "host" else max(row.first_allocator, row.first_driver)


def _later(row: MeasuredOp) -> int:
    return row.later_allocator if row.source == "host" else max(row.later_allocator, row.later_driver)


def _mib(num_bytes: int) -> str:
    return f"{num_bytes / MIB:.1f} MiB"
