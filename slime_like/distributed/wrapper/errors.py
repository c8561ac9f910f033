"""Error message of a failed op: its group, size, ranks and phase, this rank's memory, and suspicious ops of this node's ranks."""

from __future__ import annotations

import math
import threading
import time

import torch.distributed as dist

from slime_like.distributed.forensics.report import CollectiveFinding, findings, list_ranks
from slime_like.distributed.forensics.ring import read_rings
from slime_like.distributed.guard.counters import Counter
from slime_like.distributed.wrapper.wrapper import Wrapper
from slime_like.errors import CollectiveError

ARRIVAL_WAIT_S = 2.0  # an op can fail before its peers, which are not at fault, have issued it
POLL_S = 0.1


def explain(w: Wrapper, counter: Counter, index: int, error: BaseException) -> CollectiveError:
    """Return the error to raise for op ``index`` of the ring. Its message describes the suspicious ops of the node's ranks.

    If the op failed within ``ARRIVAL_WAIT_S``, wait up to ``ARRIVAL_WAIT_S`` for running ranks that have not issued this op or
    another op of their peers. Size, number and duration are unknown if later ops have overwritten the op's record.
    """
    start = w.ring.first_word(index)
    recorded_index, started_ns, _, size, _, sequence = w.ring.words[start : start + 6].tolist()
    info = counter.group.info
    rank = dist.get_rank() if dist.is_initialized() else "?"
    if recorded_index == index:
        waited_s = (time.perf_counter_ns() - started_ns) / 1e9
        text = f"{counter.op.name} #{sequence} of {size} bytes failed on rank {rank} after {waited_s:.1f} s"
    else:
        waited_s = math.inf
        text = f"{counter.op.name} failed on rank {rank} after at least {w.ring.slots} later ops (raise guard.ring to see its details)"
    problems = _findings(w, wait_for_peers=waited_s < ARRIVAL_WAIT_S)
    cause = f"; {problems[0].headline}" if problems else ""
    lines = [
        f"{text}, phase {w.phase_name}, in group {info.label} (ranks {list_ranks(info.ranks)}){cause}",
        *(str(finding) for finding in problems),
        memory(w),
        f"{type(error).__name__}: {_first_line(error)}",
    ]
    return CollectiveError("\n".join(lines))


def _findings(w: Wrapper, *, wait_for_peers: bool) -> list[CollectiveFinding]:
    """Return the suspicious ops in the rings of this node's ranks; [] if this rank's ring is in private memory.

    With ``wait_for_peers``, first wait up to ``ARRIVAL_WAIT_S`` for running ranks to issue ops that their peers have issued.
    """
    if w.ring.folder is None:
        return []
    end = time.monotonic() + (ARRIVAL_WAIT_S if wait_for_peers else 0.0)
    while True:
        problems = findings(read_rings(w.ring.folder))
        is_pending = any("running" in rank for finding in problems for rank in finding.absent)
        if not is_pending or time.monotonic() >= end:
            return problems
        time.sleep(POLL_S)


def memory(w: Wrapper) -> str:
    """Describe this rank's memory. If it cannot be queried, describe the error and the last query recorded in the ring."""
    source = w.guard.source
    try:
        return (
            f"memory: {source.free() / 2**30:.2f} of {source.total / 2**30:.2f} GiB ({source.name}) free, this rank holds "
            f"{source.process_bytes() / 2**30:.2f}"
        )
    except Exception as error:  # noqa: BLE001 (fault boundary: after an error of CUDA, its queries raise too)
        return f"memory: the query failed ({type(error).__name__}: {_first_line(error)}){_last_query(w)}"


def memory_or_last(w: Wrapper, seconds: float) -> str:
    """Return ``memory(w)``. If the device does not answer within ``seconds``, describe the ring's last query instead, if any."""
    answers: list[str] = []
    query = threading.Thread(target=lambda: answers.append(memory(w)), name="memory", daemon=True)
    query.start()
    query.join(seconds)
    if answers:
        return answers[0]
    return f"memory: no answer in {seconds:g} s{_last_query(w)}"


def _last_query(w: Wrapper) -> str:
    last = w.ring.memory_state()
    return "" if last is None else f"; {last.describe(time.perf_counter_ns())}"


def _first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
