"""Who was where: the rings of a node's ranks read side by side, after a collective failed or did not end.

Torch-free: a rank reads them when its own op fails, the driver when a rank is dead or silent. What the ranks of a group
issued is compared by number: collectives count in their group, sends and receives between two ranks.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from slime_like.config.schema.collectives import Kind
from slime_like.distributed.forensics.ring import FAILED, GroupInfo, OpRecord, Reading, read_rings

TAIL = 12  # ops of each rank in a dump


@dataclass(frozen=True, slots=True)
class CollectiveFinding:
    """One op that not all ranks took part in, or not in the same way."""

    op: str
    group: GroupInfo
    sequence: int
    phase: str
    since_ns: int  # when the first rank issued it
    arrived: tuple[str, ...]
    absent: tuple[str, ...]
    different: tuple[str, ...] = ()
    lost: tuple[str, ...] = ()  # arrived, but stopped or dead since

    @property
    def headline(self) -> str:
        """Who is to blame, in one line."""
        what = f"{self.op} #{self.sequence} in group {self.group.label}"
        if self.different:
            return f"{what}: {'; '.join(self.different)}"
        if self.absent:
            return f"{what}: did not arrive: {', '.join(self.absent)}"
        if self.lost:
            return f"{what}: arrived, but then: {', '.join(self.lost)}"
        return f"{what}: every rank arrived"

    def __str__(self) -> str:
        ranks = ", ".join(map(str, self.group.ranks))
        lines = [f"{self.headline} (phase {self.phase}, ranks {ranks})", *(f"  arrived: {one}" for one in self.arrived)]
        return "\n".join([*lines, *(f"  did not arrive: {one}" for one in self.absent)])


def findings(readings: Mapping[str, Reading], now_ns: int | None = None) -> list[CollectiveFinding]:
    """What is wrong, the op that has waited longest first; empty where every rank has issued the same and none waits."""
    now = time.perf_counter_ns() if now_ns is None else now_ns
    found: list[CollectiveFinding] = []
    for role in sorted({name.rpartition("_rank")[0] for name in readings}):
        ranks = {int(n.rpartition("_rank")[2]): r for n, r in readings.items() if n.rpartition("_rank")[0] == role}
        groups = {r.group.name: r.group for reading in ranks.values() for r in reading.records if not r.group.foreign}
        for group in groups.values():
            found += _of_group(group, ranks, now)
        found += _receives(ranks, now)
    return sorted(found, key=lambda f: (not f.different, not f.absent, not f.lost, f.since_ns))


def _of_group(group: GroupInfo, ranks: Mapping[int, Reading], now: int) -> Iterator[CollectiveFinding]:
    """The first collective of a group at which its ranks part, or that some of them still wait in."""
    issued = {rank: _collectives(ranks[rank], group) for rank in group.ranks if rank in ranks}
    last = {rank: max(ops, default=0) for rank, ops in issued.items()}
    numbers = sorted({number for ops in issued.values() for number in ops})
    for number in numbers:
        here = {rank: ops[number] for rank, ops in issued.items() if number in ops}
        absent = [rank for rank in group.ranks if last.get(rank, 0) < number]
        different = list(_different(here))
        waits = any(record.ended_ns in (0, FAILED) for record in here.values())
        if not (different or absent or waits):
            continue
        first = min(here.values(), key=lambda record: record.started_ns)
        yield CollectiveFinding(
            first.op.name,
            group,
            number,
            first.phase,
            first.started_ns,
            tuple(f"rank {rank} ({_issued(record, now)})" for rank, record in sorted(here.items())),
            tuple(f"rank {rank} ({_whereabouts(ranks.get(rank), now)})" for rank in absent),
            tuple(different),
            tuple(
                f"rank {rank} (process {ranks[rank].pid} {ranks[rank].state})"
                for rank in sorted(here)
                if ranks[rank].state != "running"
            ),
        )
        return


def _collectives(reading: Reading, group: GroupInfo) -> dict[int, OpRecord]:
    return {r.sequence: r for r in reading.records if r.group.name == group.name and r.op.kind is Kind.COLLECTIVE}


def _different(here: Mapping[int, OpRecord]) -> Iterator[str]:
    """Ranks whose op or size is not what most have."""
    sizes = all(record.op.alike for record in here.values())
    signature = {rank: (r.op.name, r.num_bytes if sizes else 0) for rank, r in here.items()}
    counts = Counter(signature.values())
    if len(counts) < 2:
        return
    # Of two ranks neither is the odd one: both are named.
    most = max(counts.values())
    usual = [what for what, count in counts.items() if count == most]
    for what in counts:
        if what not in usual or len(usual) > 1:
            who = ", ".join(str(rank) for rank, has in signature.items() if has == what)
            yield f"rank {who} issued {what[0]} of {here[int(who.split(',')[0])].num_bytes} bytes"
    if len(usual) == 1:
        rest = ", ".join(str(rank) for rank, has in signature.items() if has == usual[0])
        yield f"ranks {rest} {usual[0][0]} of {here[int(rest.split(',')[0])].num_bytes} bytes"


def _receives(ranks: Mapping[int, Reading], now: int) -> Iterator[CollectiveFinding]:
    """Receives in flight whose send was not issued."""
    for rank, reading in ranks.items():
        for record in reading.records:
            waits = record.ended_ns in (0, FAILED) and record.op.name == "irecv"
            if not waits or record.peer is None or record.peer < 0 or record.group.foreign:
                continue
            group = record.group
            sender = group.ranks[record.peer]
            mine = group.ranks.index(rank)
            if any(r.sequence >= record.sequence for r in _sends(ranks.get(sender), group, mine)):
                continue
            absent = f"rank {sender}, which is to send ({_whereabouts(ranks.get(sender), now)})"
            arrived = f"rank {rank} ({_issued(record, now)})"
            yield CollectiveFinding(
                "irecv", group, record.sequence, record.phase, record.started_ns, (arrived,), (absent,)
            )
            break


def _sends(reading: Reading | None, group: GroupInfo, peer: int) -> Iterator[OpRecord]:
    for record in reading.records if reading is not None else ():
        if record.op.name == "isend" and record.group.name == group.name and record.peer == peer:
            yield record


def _issued(record: OpRecord, now: int) -> str:
    end = {0: "waits", FAILED: "failed"}.get(record.ended_ns, "went on")
    return f"{record.num_bytes} bytes, {(now - record.started_ns) / 1e9:.1f} s ago, {end}"


def _whereabouts(reading: Reading | None, now: int) -> str:
    """Where a rank is instead."""
    if reading is None:
        return "no record of it on this node"
    process = f"process {reading.pid} {reading.state}"
    if not reading.records:
        return f"{process}, no op yet"
    flying = [r for r in reading.records if r.in_flight]
    record = flying[-1] if flying else reading.records[-1]
    what = f"{record.op.name} #{record.sequence} of group {record.group.label}"
    if record.in_flight:
        return f"{process}, in {what} for {(now - record.started_ns) / 1e9:.1f} s, phase {record.phase}"
    ended = max(record.ended_ns, record.started_ns)
    return f"{process}, last op {what} {(now - ended) / 1e9:.1f} s ago, phase {record.phase}"


def missing(readings: Mapping[str, Reading], ranks: Iterable[int], me: str, rebuild: int) -> str:
    """Which of ``ranks`` did not come to make communicators the ``rebuild``-th time, as the rank called ``me`` sees it."""
    role, now = me.rpartition("_rank")[0], time.perf_counter_ns()
    found = {rank: readings.get(f"{role}_rank{rank}") for rank in ranks}
    late = [
        f"rank {rank} ({_whereabouts(reading, now)})"
        for rank, reading in found.items()
        if reading is not None and (reading.state != "running" or reading.rebuilds < rebuild)
    ]
    unseen = ", ".join(str(rank) for rank, reading in found.items() if reading is None)
    said = f"did not come: {', '.join(late)}" if late else "every rank whose record is on this node came"
    return f"{said}; no record on this node: ranks {unseen}" if unseen else said


def report(folder: Path | None) -> str:
    """All findings of a folder of rings, the likeliest cause first; empty where there are none."""
    return "" if folder is None or not folder.is_dir() else "\n".join(str(one) for one in findings(read_rings(folder)))


def dump(folder: Path) -> str:
    """Findings, and memory and the last ops of every rank, for a crash bundle; empty where no rank left a ring."""
    readings = read_rings(folder) if folder.is_dir() else {}
    if not readings:
        return ""
    now = time.perf_counter_ns()
    found = findings(readings, now)
    lines = [*(str(one) for one in found)] or ["every rank issued the same collectives, and none waits in one"]
    for reading in readings.values():
        memory = "free memory never asked for" if reading.memory is None else reading.memory.told(now)
        lines += ["", f"{reading.name}: process {reading.pid} {reading.state}, {memory}; oldest first"]
        lines += _tail(reading.records[-TAIL:], now)
    return "\n".join(lines) + "\n"


def _tail(records: Iterable[OpRecord], now: int) -> Iterator[str]:
    for record in records:
        peer = "" if record.peer is None else f" with rank {record.peer} of the group"
        yield (
            f"  {record.op.name} #{record.sequence} in {record.group.label}{peer}, phase {record.phase}: "
            f"{_issued(record, now)}"
        )
