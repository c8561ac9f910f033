"""What a failed collective says: op, group, sizes, ranks, phase, memory, and who was where."""

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
    """``error`` of the op with number ``index`` in the ring, with everything that the node's ranks know of it."""
    place = w.ring.place(index)
    size, sequence = w.ring.words[place + 3], w.ring.words[place + 5]
    waited = (time.perf_counter_ns() - w.ring.words[place + 1]) / 1e9
    info = counter.group.info
    rank = dist.get_rank() if dist.is_initialized() else "?"
    first = (str(error).strip().splitlines() or [type(error).__name__])[0]
    found = _findings(w, patient=waited < PATIENCE_S)
    cause = f"; {found[0].headline}" if found else ""
    lines = [
        f"{counter.op.name} #{sequence} of {size} bytes failed on rank {rank} after {waited:.1f} s, phase {w.phase_name}, "
        f"in group {info.label} (ranks {', '.join(map(str, info.ranks))}){cause}",
        *(str(one) for one in found),
        memory(w),
        f"{type(error).__name__}: {first}",
    ]
    return CollectiveError("\n".join(lines))


def _findings(w: Wrapper, *, patient: bool) -> list[CollectiveFinding]:
    """What the rings say; ``patient``: once every living rank has arrived, or after a moment."""
    if w.ring.folder is None:
        return []
    until = time.monotonic() + (PATIENCE_S if patient else 0.0)
    while True:
        found = findings(read_rings(w.ring.folder))
        late = any("running" in who for one in found for who in one.absent)
        if not late or time.monotonic() >= until:
            return found
        time.sleep(POLL_S)


def memory(w: Wrapper) -> str:
    """Memory of this rank in a few words."""
    source = w.guard.source
    return (
        f"memory: {source.free() / 2**30:.2f} of {source.total / 2**30:.2f} GiB ({source.name}) free, this rank holds "
        f"{source.held() / 2**30:.2f}"
    )


def memory_soon(w: Wrapper, seconds: float) -> str:
    """The same where the device may hang, and with it whoever asks: after so many seconds, what was found last."""
    said: list[str] = []
    asking = threading.Thread(target=lambda: said.append(memory(w)), name="memory", daemon=True)
    asking.start()
    asking.join(seconds)
    if said:
        return said[0]
    found = w.ring.memory_state()
    return f"memory: no answer in {seconds:g} s" + ("" if found is None else f"; {found.told(time.perf_counter_ns())}")
