"""From what every op took of memory on every rank: a table, and a guard policy with the reason for each op. Torch-free."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Set
from dataclasses import dataclass
from pathlib import Path

from slime_like.config.schema.collectives import OPS

MIB = 2**20
# Less is not told from noise: a driver gives memory in pieces of 2 MiB, a process's resident memory wavers.
NOISE = 2 * MIB
LEAST_THRESHOLD = 256 * MIB
CHEAP = 0.001  # a question that takes less of an op's own time may be asked before each call


@dataclass(frozen=True, slots=True)
class MeasuredOp:
    """One op in one group on one rank. Bytes; ``first``: the most of its first call and of those that carried more than any
    before them; ``later``: the most of any other."""

    op: str
    group: str
    source: str  # driver | allocator | host
    calls: int
    num_bytes: int
    time_ns: int  # in the op
    question_ns: int  # of one question for free memory
    first_allocator: int
    first_driver: int
    later_allocator: int
    later_driver: int


@dataclass(frozen=True, slots=True)
class Advice:
    """A policy for one op, and why."""

    op: str
    checks: str
    reason: str


def write_rows(path: Path, rows: Iterable[MeasuredOp]) -> None:
    """A rank's rows, whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    scratch = path.with_suffix(".tmp")
    scratch.write_text(json.dumps([dataclasses.asdict(row) for row in rows]))
    scratch.rename(path)


def read_rows(folder: Path) -> dict[str, list[MeasuredOp]]:
    """Rank -> its rows."""
    return {
        path.stem: [MeasuredOp(**row) for row in json.loads(path.read_text())] for path in sorted(folder.glob("*.json"))
    }


def table(ranks: Mapping[str, list[MeasuredOp]]) -> Iterator[str]:
    """A line for each op of each kind of group: the worst of all ranks; sizes in MiB."""
    drops = "first use: allocator drop | driver drop | steady state: allocator drop | driver drop"
    yield f"| op | group | ranks | calls | bytes per call | {drops} | question us |"
    yield "|---|---|---|---|---|---|---|---|---|---|"
    for (op, group), rows in sorted(_by(ranks, lambda row: (row.op, row.group)).items()):
        worst = _worst(rows)
        calls = sum(row.calls for row in rows)
        size = sum(row.num_bytes for row in rows) / calls
        taken = (worst.first_allocator, worst.first_driver, worst.later_allocator, worst.later_driver)
        sizes = " | ".join(f"{drop / MIB:.2f}" for drop in taken)
        yield f"| {op} | {group} | {len(rows)} | {calls} | {size:.0f} | {sizes} | {worst.question_ns / 1e3:.1f} |"


def advise(ranks: Mapping[str, list[MeasuredOp]]) -> list[Advice]:
    """For each op that was seen, over all groups and ranks."""
    found: list[Advice] = []
    for (op,), rows in sorted(_by(ranks, lambda row: (row.op,)).items()):
        worst, calls = _worst(rows), sum(row.calls for row in rows)
        first, later = _first(worst), _later(worst)
        share = worst.question_ns * calls / max(1, sum(row.time_ns for row in rows))
        if first <= NOISE and later <= NOISE:
            checks, why = "never", f"takes no memory: at most {_mib(max(first, later))} in {calls} calls"
        elif later <= NOISE:
            checks, why = (
                "auto",
                f"the first use of a size takes {_mib(first)}, no later one of {calls} calls more than {_mib(later)}",
            )
        elif share <= CHEAP:
            why = f"a later call took {_mib(later)}; a question before each is {share:.2%} of the op's own time"
            checks = "below"
        else:
            why = f"a later call took {_mib(later)}; a question before each would be {share:.1%} of the op's own time"
            checks = "auto"
        found.append(Advice(op, checks, why))
    return found


def threshold(ranks: Mapping[str, list[MeasuredOp]]) -> tuple[int, str]:
    """In MiB, and why: room for the hungriest op twice."""
    rows = [row for found in ranks.values() for row in found]
    hungriest = max(rows, key=lambda row: max(_first(row), _later(row)))
    most = max(_first(hungriest), _later(hungriest))
    if 2 * most <= LEAST_THRESHOLD:
        return LEAST_THRESHOLD // MIB, f"no op took more than {_mib(most)}"
    where = "at its first use" if _first(hungriest) == most else "at a later call"
    return -(-2 * most // MIB), f"twice the {_mib(most)} that {hungriest.op} took in group {hungriest.group} {where}"


def to_yaml(ranks: Mapping[str, list[MeasuredOp]], origin: str) -> str:
    """A file for the config group ``guard``."""
    size, why = threshold(ranks)
    lines = [
        f"# Measured by scripts/profile_comm.py: {origin}.",
        "checks: auto",
        f"threshold: {size}MiB  # {why}",
        "ops:",
    ]
    for advice in [*(seen := advise(ranks)), *_unseen({advice.op for advice in seen})]:
        lines += [f"  {advice.op}: {advice.checks}  # {advice.reason}"]
    return "\n".join(lines) + "\n"


def _unseen(seen: Set[str]) -> Iterator[Advice]:
    """For every other op there is."""
    for op in OPS:
        if op.name not in seen:
            yield Advice(op.name, "auto", "not seen: nothing is known of what it takes")


def _by[K: tuple[str, ...]](
    ranks: Mapping[str, list[MeasuredOp]], key: Callable[[MeasuredOp], K]
) -> dict[K, list[MeasuredOp]]:
    found: dict[K, list[MeasuredOp]] = {}
    for rows in ranks.values():
        for row in rows:
            found.setdefault(key(row), []).append(row)
    return found


def _worst(rows: list[MeasuredOp]) -> MeasuredOp:
    names = ("question_ns", "first_allocator", "first_driver", "later_allocator", "later_driver")
    return dataclasses.replace(rows[0], **{name: max(getattr(row, name) for row in rows) for name in names})


def _first(row: MeasuredOp) -> int:
    """What the first use took. Free memory of a host is every process's: there only this process's own counts."""
    return row.first_allocator if row.source == "host" else max(row.first_allocator, row.first_driver)


def _later(row: MeasuredOp) -> int:
    return row.later_allocator if row.source == "host" else max(row.later_allocator, row.later_driver)


def _mib(num_bytes: int) -> str:
    return f"{num_bytes / MIB:.1f} MiB"
