"""Functions that release and rebuild releasable communicators (``guard.release``). ``releasable`` defines their backends."""

# torch has no public registry of process groups and backends.
# pyright: reportPrivateUsage=false
from __future__ import annotations

import itertools
import time
from typing import Any

import torch
import torch.distributed as dist

from slime_like.distributed.forensics.report import list_ranks, missing_ranks
from slime_like.distributed.forensics.ring import read_rings
from slime_like.distributed.wrapper.errors import memory
from slime_like.distributed.wrapper.releasable import KEY_PREFIX, drop_destroyed_groups, reloadables, target
from slime_like.distributed.wrapper.wrapper import Wrapper
from slime_like.errors import CollectiveError

# Number of the next rebuild, the same on every rank. Each rebuild has store keys of its own.
_rebuild_numbers = itertools.count(1)


def check_removable(w: Wrapper | None, *, replaced: bool) -> None:
    """Raise ``CollectiveError`` if removing the wrapper would leave groups unable to execute ops.

    ``replaced``: another wrapper takes over the groups, so that only released communicators are an obstacle.
    """
    drop_destroyed_groups()
    if w is None or not w.spec.release or not reloadables or (replaced and not w.released):
        return
    fix = (
        "rebuild them first, in a phase of slime_like.distributed.wrapper.install.phase"
        if replaced
        else "destroy them first (torch.distributed.destroy_process_group)"
    )
    raise CollectiveError(
        f"the wrapper cannot be removed while {len(reloadables)} groups have releasable communicators (guard.release=true), which "
        f"would refuse every op: {fix}"
    )


def release(w: Wrapper) -> None:
    """Destroy the communicators of every releasable group, including the world. Every rank must call this function.

    Raises ``CollectiveError`` if an asynchronous op of this rank has not ended, or if a rank does not call.
    """
    if w.released or not dist.is_initialized() or not reloadables:
        return
    w.record_completed()
    works = [(counter, ref()) for _, (ref, counter, _) in w.pending_works.items()]
    if in_flight := sorted({c.op.name for c, work in works if work is not None and not work.is_completed()}):
        raise CollectiveError(
            f"communicators cannot be released while {', '.join(in_flight)} has not ended: wait for it"
        )
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()
    dist.barrier()
    start_ns = time.perf_counter_ns()
    _delete_address_keys(dist.distributed_c10d._get_default_store())
    w.released = tuple(reloadables)
    for counters in w.counters_by_op.values():
        for group in w.released:
            counter = counters.pop(group, None)
            if counter is not None:
                w.released_counters[counter.op.name, group] = counter
                counter.target = None
    for group in reversed(w.released):
        reloadables[group].live_group = None
        for backend in reloadables[group].backends.values():
            backend.drop()
    w.reload_ns += time.perf_counter_ns() - start_ns


def rebuild(w: Wrapper) -> None:
    """Rebuild the communicators, in the order in which their groups were created. Every rank must call this function.

    All ranks created their groups in the same order. Ranks that two groups have in common therefore build the same group
    first, which excludes a deadlock. Raises ``CollectiveError`` if a group cannot be rebuilt, as when a rank does not join.
    """
    start_ns, number = time.perf_counter_ns(), next(_rebuild_numbers)
    w.ring.record_rebuild(number)
    for group in w.released:
        for backend in reloadables[group].backends.values() if group in reloadables else ():
            try:
                backend.build(number)
            except RuntimeError as error:
                info = w.group_record(group).info
                first_line = (str(error).strip().splitlines() or [type(error).__name__])[0]
                role = w.name.rpartition("_rank")[0]
                readings = {} if w.ring.folder is None else read_rings(w.ring.folder)
                raise CollectiveError(
                    f"communicators of group {info.label} (ranks {list_ranks(info.ranks)}) could not be rebuilt "
                    f"for phase {w.phase_name} on rank {dist.get_rank()} (rebuild #{number}): "
                    f"{missing_ranks(readings, info.ranks, role, number)}; {first_line}\n{memory(w)}"
                ) from error
    w.released = ()
    for (op, group), counter in w.released_counters.items():
        if group in reloadables:
            counter.target = target(group)
            w.counters_by_op[op][group] = counter
    w.released_counters.clear()
    w.generation += 1
    w.reload_ns += time.perf_counter_ns() - start_ns


def _delete_address_keys(store: Any) -> None:
    """On rank 0, delete from a ``TCPStore`` the addresses of rebuilt communicators, which all ranks have read."""
    while hasattr(store, "underlying_store"):
        store = store.underlying_store
    if dist.get_rank() == 0 and isinstance(store, dist.TCPStore):
        for key in store.list_keys():
            if f"/{KEY_PREFIX}" in key:
                store.delete_key(key)
