"""Comparison of the ring buffers of a node's ranks after a collective failed or hung.

A rank reads the rings when its own op fails or hangs. The driver reads them when a rank is dead or does not respond, so this
module does not import torch. Ops are compared by number: collectives are numbered per group, sends and receives per
group and pair of ranks.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from slime_like.config.schema.collectives import Kind
from slime_like.distributed.forensics.ring import FAILED, GroupInfo, OpRecord, Reading, read_rings

TAIL = 12  # ops per rank in a dump
MAX_LISTED = 8  # ranks, or ranges of ranks, that a message lists


@dataclass(frozen=True, slots=True)
class CollectiveFinding:
    """A suspicious op: missing on some ranks, issued differently by some, or unfinished or failed on some."""

    op: str
    group: GroupInfo
    sequence: int
    phase: str
    since_ns: int  # when the first rank issued it
    arrived: tuple[str, ...]
    absent: tuple[str, ...]
    mismatches: tuple[str, ...] = ()  # ranks that issued another op or size
    lost_ranks: tuple[str, ...] = ()  # ranks that arrived and are now suspended (SIGSTOP) or dead
    unknown: tuple[int, ...] = ()  # ranks without a ring here, mostly those of other nodes: they may have arrived

    @property
    def headline(self) -> str:
        """One line that names the likely cause."""
        op = f"{self.op} #{self.sequence} in group {self.group.label}"
        if self.mismatches:
            return f"{op}: {'; '.join(self.mismatches)}"
        if self.absent:
            return f"{op}: did not arrive: {', '.join(self.absent)}"
        if self.lost_ranks:
            return f"{op}: arrived, but then: {', '.join(self.lost_ranks)}"
        if self.unknown:
            return f"{op}: every rank on this node arrived; not recorded here: ranks {list_ranks(self.unknown)}"
        return f"{op}: every rank arrived"

    def __str__(self) -> str:
        lines = [
            f"{self.headline} (phase {self.phase}, ranks {list_ranks(self.group.ranks)})",
            *(f"  arrived: {rank}" for rank in self.arrived),
        ]
        return "\n".join([*lines, *(f"  did not arrive: {rank}" for rank in self.absent)])


def list_ranks(ranks: Sequence[int]) -> str:
    """Format ranks for a message.

    More than ``MAX_LISTED`` ranks are written as ranges. Of more than ``MAX_LISTED`` ranges, only the first ones and
    the last are written.
    """
    if len(ranks) <= MAX_LISTED:
        return ", ".join(map(str, ranks))
    starts = [i for i in range(len(ranks)) if i == 0 or ranks[i] != ranks[i - 1] + 1]
    ends = [*(start - 1 for start in starts[1:]), len(ranks) - 1]
    parts = [f"{ranks[i]}-{ranks[j]}" if i < j else str(ranks[i]) for i, j in zip(starts, ends, strict=True)]
    if len(parts) <= MAX_LISTED:
        return ", ".join(parts)
    return f"{', '.join(parts[: MAX_LISTED - 1])} ... {parts[-1]} ({len(ranks)} ranks)"


def findings(readings: Mapping[str, Reading], now_ns: int | None = None) -> list[CollectiveFinding]:
    """Return each group's first suspicious collective and each rank's first suspicious receive, likeliest cause first.

    The result is empty if all ranks issued the same ops and all succeeded.
    """
    now = time.perf_counter_ns() if now_ns is None else now_ns
    result: list[CollectiveFinding] = []
    for role in sorted({name.rpartition("_rank")[0] for name in readings}):
        ranks = {int(n.rpartition("_rank")[2]): r for n, r in readings.items() if n.rpartition("_rank")[0] == role}
        groups = {r.group.name: r.group for reading in ranks.values() for r in reading.records if not r.group.foreign}
        for group in groups.values():
            result += _group_findings(group, ranks, now)
        result += _receive_findings(ranks, now)
    return sorted(result, key=lambda f: (not f.mismatches, not f.absent, not f.lost_ranks, f.since_ns))


def _group_findings(group: GroupInfo, ranks: Mapping[int, Reading], now: int) -> Iterator[CollectiveFinding]:
    """Yield the group's first suspicious collective, if any: missing on a rank, issued differently, unfinished or failed."""
    ops_of_rank = {rank: _collectives(ranks[rank], group) for rank in group.ranks if rank in ranks}
    last_ops = {rank: max(ops, default=0) for rank, ops in ops_of_rank.items()}
    unknown_ranks = tuple(rank for rank in group.ranks if rank not in ranks)
    numbers = sorted({number for ops in ops_of_rank.values() for number in ops})
    for number in numbers:
        arrived = {rank: ops[number] for rank, ops in ops_of_rank.items() if number in ops}
        absent = [rank for rank, newest in last_ops.items() if newest < number]
        mismatches = list(_mismatches(arrived))
        waits = any(record.ended_ns in (0, FAILED) for record in arrived.values())
        if not (mismatches or absent or waits):
            continue
        first = min(arrived.values(), key=lambda record: record.started_ns)
        yield CollectiveFinding(
            first.op.name,
            group,
            number,
            first.phase,
            first.started_ns,
            tuple(f"rank {rank} ({_describe_issue(record, now)})" for rank, record in sorted(arrived.items())),
            tuple(f"rank {rank} ({_describe_rank(ranks[rank], now)})" for rank in absent),
            tuple(mismatches),
            tuple(
                f"rank {rank} (process {ranks[rank].pid} {ranks[rank].state})"
                for rank in sorted(arrived)
                if ranks[rank].is_lost
            ),
            unknown_ranks,
        )
        return


def _collectives(reading: Reading, group: GroupInfo) -> dict[int, OpRecord]:
    return {r.sequence: r for r in reading.records if r.group.name == group.name and r.op.kind is Kind.COLLECTIVE}


def _mismatches(arrived: Mapping[int, OpRecord]) -> Iterator[str]:
    """Yield a description for each (op, size) that ranks issued, with these ranks; nothing if all issued the same.

    If one (op, size) is the commonest, it comes last. Sizes count only if all these ops require equal sizes.
    """
    compare_sizes = all(record.op.equal_sizes for record in arrived.values())
    issues = {rank: (r.op.name, r.num_bytes if compare_sizes else 0) for rank, r in arrived.items()}
    num_ranks = Counter(issues.values())
    if len(num_ranks) < 2:
        return
    max_ranks = max(num_ranks.values())
    majorities = [issue for issue, count in num_ranks.items() if count == max_ranks]
    # Without a single majority, for example with two ranks, every rank is named.
    for issue in num_ranks:
        if issue not in majorities or len(majorities) > 1:
            ranks = [rank for rank, rank_issue in issues.items() if rank_issue == issue]
            yield f"rank {', '.join(map(str, ranks))} issued {issue[0]} of {arrived[ranks[0]].num_bytes} bytes"
    if len(majorities) == 1:
        ranks = [rank for rank, rank_issue in issues.items() if rank_issue == majorities[0]]
        yield f"ranks {', '.join(map(str, ranks))} {majorities[0][0]} of {arrived[ranks[0]].num_bytes} bytes"


def _receive_findings(ranks: Mapping[int, Reading], now: int) -> Iterator[CollectiveFinding]:
    """Yield, for each rank, its first receive that has not succeeded and whose sender has not recorded the send.

    Receives that accept any sender are skipped, and so are those in groups with ranks outside this world.
    """
    for rank, reading in ranks.items():
        for record in reading.records:
            waits = record.ended_ns in (0, FAILED) and record.op.name == "irecv"
            if not waits or record.peer is None or record.peer < 0 or record.group.foreign:
                continue
            group = record.group
            sender = group.ranks[record.peer]
            group_rank = group.ranks.index(rank)
            if any(r.sequence >= record.sequence for r in _sends(ranks.get(sender), group, group_rank)):
                continue
            arrived = (f"rank {rank} ({_describe_issue(record, now)})",)
            absent = (f"rank {sender}, the sender ({_describe_rank(ranks[sender], now)})",) if sender in ranks else ()
            unknown_ranks = () if absent else (sender,)
            yield CollectiveFinding(
                "irecv", group, record.sequence, record.phase, record.started_ns, arrived, absent, unknown=unknown_ranks
            )
            break


def _sends(reading: Reading | None, group: GroupInfo, peer: int) -> Iterator[OpRecord]:
    for record in reading.records if reading is not None else ():
        if record.op.name == "isend" and record.group.name == group.name and record.peer == peer:
            yield record


def _describe_issue(record: OpRecord, now: int) -> str:
    end = {0: "waits", FAILED: "failed"}.get(record.ended_ns, "ended")
    return f"{record.num_bytes} bytes, {(now - record.started_ns) / 1e9:.1f} s ago, {end}"


def _describe_rank(reading: Reading, now: int) -> str:
    """Describe the state of a rank's process, and its last op in flight or, if there is none, its last op."""
    process = f"process {reading.pid} {reading.state}"
    if not reading.records:
        return f"{process}, no op yet"
    in_flight = [r for r in reading.records if r.in_flight]
    record = in_flight[-1] if in_flight else reading.records[-1]
    op = f"{record.op.name} #{record.sequence} of group {record.group.label}"
    if record.in_flight:
        return f"{process}, in {op} for {(now - record.started_ns) / 1e9:.1f} s, phase {record.phase}"
    end_ns = max(record.ended_ns, record.started_ns)
    return f"{process}, last op {op} {(now - end_ns) / 1e9:.1f} s ago, phase {record.phase}"


def missing_ranks(readings: Mapping[str, Reading], ranks: Iterable[int], role: str, rebuild: int) -> str:
    """Describe which of a role's ``ranks`` did not start the ``rebuild``-th rebuild of communicators, or are dead or suspended.

    Ranks without a record on this node are listed separately.
    """
    now = time.perf_counter_ns()
    by_rank = {rank: readings.get(f"{role}_rank{rank}") for rank in ranks}
    absent = [
        f"rank {rank} ({_describe_rank(reading, now)})"
        for rank, reading in by_rank.items()
        if reading is not None and (reading.is_lost or reading.rebuilds < rebuild)
    ]
    unreadable = list_ranks([rank for rank, reading in by_rank.items() if reading is None])
    text = f"did not arrive: {', '.join(absent)}" if absent else "every rank whose record is on this node arrived"
    return f"{text}; no record on this node: ranks {unreadable}" if unreadable else text


def report(folder: Path | None) -> str:
    """Return the findings in a folder of rings as text, likeliest cause first.

    The text is empty if there are no findings, or no folder.
    """
    if folder is None or not folder.is_dir():
        return ""
    return "\n".join(str(finding) for finding in findings(read_rings(folder)))


def dump(folder: Path) -> str:
    """Return findings, memory and the last ops of every rank, for a crash bundle; empty if there are no rings."""
    readings = read_rings(folder) if folder.is_dir() else {}
    if not readings:
        return ""
    now = time.perf_counter_ns()
    problems = findings(readings, now)
    lines = [*(str(finding) for finding in problems)] or [
        "every rank issued the same collectives, and none waits in one"
    ]
    for reading in readings.values():
        memory = "free memory never queried" if reading.memory is None else reading.memory.describe(now)
        lines += ["", f"{reading.name}: process {reading.pid} {reading.state}, {memory}; oldest first"]
        lines += _tail(reading.records[-TAIL:], now)
    return "\n".join(lines) + "\n"


def _tail(records: Iterable[OpRecord], now: int) -> Iterator[str]:
    for record in records:
        peer = "" if record.peer is None else f" with rank {record.peer} of the group"
        yield (
            f"  {record.op.name} #{record.sequence} in {record.group.label}{peer}, phase {record.phase}: "
            f"{_describe_issue(record, now)}"
        )
