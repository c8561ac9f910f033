"""CPU time to find, from the rings of many ranks, which rank missed a collective; for ``benchmarks/scale.py``.

A ring is a rank's record of its last collectives (``slime_like.distributed.forensics.ring``).
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from benchmarks.scale_engines import median
from slime_like.config.schema.collectives import canonical
from slime_like.config.schema.guard import GuardConfig
from slime_like.distributed.forensics.report import dump, findings
from slime_like.distributed.forensics.ring import (
    CODES,
    GROUP_SHIFT,
    NO_PEER,
    RECORD,
    GroupInfo,
    Ring,
    read_rings,
)

TP = 8
GROUPS = 21  # of a rank: world, tensor parallel and data parallel groups in turns
OP = canonical("ProcessGroup", "all_reduce")
NODE = 8  # ranks of a node
MAX_RINGS = 256


@dataclass(frozen=True, slots=True)
class RingTimes:
    """CPU seconds to describe a rank's groups and to report on rings, and the bytes of one rank's ring."""

    num_ranks: int
    num_rings: int
    describe: float  # groups of one rank
    node: float  # report of a node
    all_rings: float  # report of all rings
    dump: float  # report of all rings with the last ops of every rank, as in a crash bundle
    num_bytes: int


def measure(num_ranks: int, rounds: int) -> RingTimes:
    """Return the CPU times of reports on a node's rings and on the rings of ``num_ranks`` ranks. One rank missed the last op.

    If there are more than ``MAX_RINGS`` ranks, only the first ``NODE`` of them have a ring. Raises ``AssertionError`` if a
    report does not name the rank that missed the op.
    """
    late_rank, num_rings = NODE - 1, num_ranks if num_ranks <= MAX_RINGS else NODE
    with tempfile.TemporaryDirectory() as folder:
        node, all_ranks = Path(folder) / "node", Path(folder) / "all"
        rings = [Ring(node, f"trainer_rank{rank}", GuardConfig().ring) for rank in range(NODE)]
        rings += [Ring(all_ranks, f"trainer_rank{rank}", GuardConfig().ring) for rank in range(num_rings)]
        describe = median([_timed(_describe, ring, num_ranks)[0] for ring in rings])
        for ring in rings:
            _fill(ring, arrives=_rank(ring) != late_rank)
        node_s, all_s = (_reported(_report, path, late_rank, rounds) for path in (node, all_ranks))
        dump_s = _reported(dump, all_ranks, late_rank, rounds)
        num_bytes = sum(file.stat().st_size for file in node.glob("trainer_rank0.*"))
        for ring in rings:
            ring.close()
    return RingTimes(num_ranks, num_rings, describe, node_s, all_s, dump_s, num_bytes)


def groups_of(rank: int, num_ranks: int) -> list[GroupInfo]:
    """Return the process groups of a rank."""
    first = rank // TP * TP
    members = (range(num_ranks), range(first, first + TP), range(rank % TP, num_ranks, TP))
    labels = ("world", "tp", "dp")
    return [
        GroupInfo(
            number,
            f"{labels[number % 3]}{number}_{members[number % 3][0]}",
            labels[number % 3],
            tuple(members[number % 3]),
        )
        for number in range(GROUPS)
    ]


def _describe(ring: Ring, num_ranks: int) -> None:
    for group in groups_of(_rank(ring), num_ranks):
        ring.add_group(group)


def _rank(ring: Ring) -> int:
    assert ring.path is not None, "a ring in a folder"
    return int(ring.path.stem.removeprefix("trainer_rank"))


def _fill(ring: Ring, *, arrives: bool) -> None:
    """Write completed ops to the ring: as many whole cycles over the groups as fit.

    If ``arrives``, add an unfinished op of the world group: the rank waits in it.
    """
    code, phase = CODES[OP.name], ring.phase_number("step")
    assert phase == 0, "the only phase has number 0, which the codes below contain"
    num_ops = ring.slots - ring.slots % GROUPS
    for op in range(num_ops):
        _write(ring, code | (op % GROUPS) << GROUP_SHIFT, op // GROUPS + 1, ends=True)
    if arrives:
        _write(ring, code, num_ops // GROUPS + 1, ends=False)


def _write(ring: Ring, code: int, sequence: int, *, ends: bool) -> None:
    index, offset, end = ring.next_record()
    RECORD.pack_into(ring.memory, offset, index, time.perf_counter_ns(), 0, 4096, code, sequence, NO_PEER)
    if ends:
        ring.words[end] = time.perf_counter_ns()


def _report(folder: Path) -> str:
    return "\n".join(map(str, findings(read_rings(folder))))


def _reported(report: Callable[[Path], str], folder: Path, late: int, rounds: int) -> float:
    """Return the median CPU seconds of ``report``. Raises ``AssertionError`` if its text does not name rank ``late``."""
    results = [_timed(report, folder) for _ in range(rounds)]
    for _, text in results:
        headline = text.partition("\n")[0]
        assert headline.startswith(f"{OP.name} #") and f"did not arrive: rank {late} (" in headline, headline
    return median([seconds for seconds, _ in results])


def _timed[**P, R](work: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> tuple[float, R]:
    """Call ``work``. Return the CPU seconds that the call took in this process, and its result."""
    start = time.process_time()
    result = work(*args, **kwargs)
    return time.process_time() - start, result
