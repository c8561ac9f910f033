"""Error message of a failed collective: op, group, sizes, ranks, phase, memory, and the other ranks' last ops."""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING

import torch.distributed as dist

from slime_like.distributed.forensics.report import CollectiveFinding, findings
from slime_like.distributed.forensics.ring import read_rings
from slime_like.distributed.guard.counters import Counter
from slime_like.errors import CollectiveError

if TYPE_CHECKING:
    from slime_like.distributed.wrapper.wrapper import Wrapper

PATIENCE_S = 2.0  # an op that fails at once may do so before its peers have arrived
POLL_S = 0.1


def explain(w: Wrapper, counter: Counter, index: int, error: BaseException) -> CollectiveError:
    """Return the error of op ``index`` in the ring, with the state of all ranks of the node."""
    place = w.ring.place(index)
    size, sequence = w.ring.words[place + 3], w.ring.words[place + 5]
    waited = (time.perf_counter_ns() - w.ring.words[place + 1]) / 1e9
    info = counter.group.info
    rank = dist.get_rank() if dist.is_initialized() else "?"
    first = (str(error).strip().splitlines() or [type(error).__name__])[0]
    problems = _findings(w, patient=waited < PATIENCE_S)
    cause = f"; {problems[0].headline}" if problems else ""
    lines = [
        f"{counter.op.name} #{sequence} of {size} bytes failed on rank {rank} after {waited:.1f} s, phase {w.phase_name}, "
        f"in group {info.label} (ranks {', '.join(map(str, info.ranks))}){cause}",
        *(str(finding) for finding in problems),
        memory(w),
        f"{type(error).__name__}: {first}",
    ]
    return CollectiveError("\n".join(lines))


def _findings(w: Wrapper, *, patient: bool) -> list[CollectiveFinding]:
    """Return the rings' findings; if ``patient``, once every living rank has arrived or ``PATIENCE_S`` has passed."""
    if w.ring.folder is None:
        return []
    until = time.monotonic() + (PATIENCE_S if patient else 0.0)
    while True:
        problems = findings(read_rings(w.ring.folder))
        pending = any("running" in rank for finding in problems for rank in finding.absent)
        if not pending or time.monotonic() >= until:
            return problems
        time.sleep(POLL_S)


def memory(w: Wrapper) -> str:
    """Describe this rank's memory."""
    source = w.guard.source
    return (
        f"memory: {source.free() / 2**30:.2f} of {source.total / 2**30:.2f} GiB ({source.name}) free, this rank holds "
        f"{source.held() / 2**30:.2f}"
    )


def memory_soon(w: Wrapper, seconds: float) -> str:
    """Return ``memory(w)``, or the last recorded reading if a hung device gives no answer within ``seconds``."""
    answers: list[str] = []
    query = threading.Thread(target=lambda: answers.append(memory(w)), name="memory", daemon=True)
    query.start()
    query.join(seconds)
    if answers:
        return answers[0]
    last = w.ring.memory_state()
    return f"memory: no answer in {seconds:g} s" + (
        "" if last is None else f"; {last.describe(time.perf_counter_ns())}"
    )
