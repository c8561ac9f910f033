"""What a failed collective says: op, group, sizes, ranks, phase, memory, and who was where."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch.distributed as dist

from slime_like.distributed.counters import Counter
from slime_like.errors import CollectiveError

if TYPE_CHECKING:
    from slime_like.distributed.wrapper import Wrapper


def explain(w: Wrapper, counter: Counter, index: int, error: BaseException) -> CollectiveError:
    """``error`` of the op with number ``index`` in the ring, with everything that this rank knows of it."""
    size = w.ring.words[w.ring.place(index) + 3]
    info = counter.group.info
    rank = dist.get_rank() if dist.is_initialized() else "?"
    first = str(error).strip().splitlines()
    return CollectiveError(
        f"{counter.op.name} failed on rank {rank} in group {info.label} (ranks {', '.join(map(str, info.ranks))}), phase "
        f"{w.phase_name}, call {counter.calls}, {size} bytes, {memory(w)}: {first[0] if first else type(error).__name__}"
    )


def memory(w: Wrapper) -> str:
    """Memory of this rank in a few words."""
    source = w.guard.source
    return (
        f"{source.free() / 2**30:.2f} of {source.total / 2**30:.2f} GiB {source.name} memory free, this rank holds "
        f"{source.held() / 2**30:.2f}"
    )
