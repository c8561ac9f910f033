"""Reloadable communicators: destroyed while nothing is communicated, rebuilt before the next collective.

megatron-core keeps its ``ProcessGroup`` objects, including the world: they persist with their ranks, names and stores.
Under ``guard.release`` they never hold a communicator but a ``Slot``. A second group of the same ranks, known only to the
wrapper, executes their ops. An op that bypasses the wrapper reaches the slot, which refuses it.

Remove when all of torch's backends can be suspended and resumed (``Backend.suspend``: in 2.14 not gloo's).
"""

# torch has no public registry of process groups and backends.
# pyright: reportPrivateUsage=false
from __future__ import annotations

import itertools
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch._C import _distributed_c10d as c10d_core
from torch.distributed import distributed_c10d as c10d

from slime_like.distributed.forensics.report import missing
from slime_like.distributed.forensics.ring import read_rings
from slime_like.distributed.wrapper.errors import memory
from slime_like.errors import CollectiveError

if TYPE_CHECKING:
    from slime_like.distributed.wrapper.wrapper import Wrapper

NAMES = ("gloo", "nccl")
# Methods that are not ops and must reach the group that executes the ops.
REDIRECTED = ("_start_coalescing", "_get_backend")
MARK = "rebuild"
# Number of rebuilds, the same on every rank, to separate their addresses in the store.
_numbers = itertools.count(1)


class Slot(c10d_core.Backend):
    """Placeholder in a ``ProcessGroup`` for a backend that may be released; ``live`` is the backend."""

    def __init__(self, create: Callable[[Any, Any], Any], request: Any, options: Any) -> None:
        super().__init__(request.group_rank, request.group_size)
        self._create, self._options, self._store = create, options, request.store
        self._asked = (request.group_rank, request.group_size, request.timeout, request.group_id)
        self._ranks = list(request.global_ranks_in_group)
        self.live: Any = create(request, options)

    def build(self, number: int) -> None:
        """Create communicators: a collective of the group's ranks if the backend connects eagerly, as gloo does."""
        request: Any = c10d._DistributedBackendOptions()
        request.store = dist.PrefixStore(f"{MARK}{number}/", self._store)
        request.group_rank, request.group_size, request.timeout, request.group_id = self._asked
        request.global_ranks_in_group = self._ranks
        self.live = self._create(request, self._options)

    def drop(self) -> None:
        """Destroy the communicators. Gloo's end with the last reference, NCCL's need a shutdown."""
        live, self.live = self.live, None
        if live is not None:
            live.shutdown()

    # Methods of a backend other than ops.
    def getBackendName(self) -> str:
        """Return a name for torch's error when an op bypasses the wrapper."""
        return "of a group with releasable communicators (guard.release=true), called without slime_like's wrapper,"

    @property
    def options(self) -> Any:
        """Options of the live backend."""
        return self.live.options

    @property
    def supports_coalescing(self) -> bool:
        """True if the live backend supports coalescing."""
        return bool(self.live.supports_coalescing)

    def shutdown(self) -> None:
        """Destroy the communicators, at the end of the group."""
        self.drop()

    def abort(self) -> None:
        """Abort the communicators."""
        live, self.live = self.live, None
        if live is not None:
            live.abort()


@dataclass(slots=True, eq=False)
class Reloadable:
    """The slots and the executing group of one ``ProcessGroup``."""

    slots: dict[str, Slot] = field(default_factory=dict[str, Slot])  # by the backend's name
    carrier: Any = None  # the group that executes the ops; created at the first op after a build


_behind: dict[Any, Reloadable] = {}  # by ProcessGroup, in order of creation, which is the same on all ranks


def place() -> list[tuple[str, Any]]:
    """Give slots to groups that are created from now on. Returns the argument of ``restore``."""
    stock: list[tuple[str, Any]] = []
    for name in NAMES:
        c10d.Backend._ensure_backend_registered(name)
        plugins: Any = c10d.Backend._plugins
        plugin = plugins[name.upper()]
        assert plugin.extended_api, (
            f"torch makes {name} groups in another way: review slime_like.distributed.wrapper.reload"
        )
        stock.append((name.upper(), plugin))
        plugins[name.upper()] = plugin._replace(creator_fn=_creator(name, plugin.creator_fn))
    return stock


def restore(stock: list[tuple[str, Any]]) -> None:
    """Let groups that are created from now on hold their communicators themselves."""
    for name, plugin in stock:
        c10d.Backend._plugins[name] = plugin


def _creator(name: str, stock: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    """Return a creator: torch's for groups with processes outside this world and split groups, a slot for all others."""

    def create(request: Any, options: Any) -> Any:
        foreign = not request.global_ranks_in_group and dist.is_initialized()
        if foreign or request.split_from is not None:
            return stock(request, options)
        slot = Slot(stock, request, options)
        _behind.setdefault(request.process_group, Reloadable()).slots[name] = slot
        return slot

    return create


def target(group: Any) -> Any:
    """Return the group that executes the ops of ``group``: itself, unless its communicators are reloadable."""
    behind = _behind.get(group)
    if behind is None or group not in c10d._world.pg_backend_config:
        return group
    if behind.carrier is None and all(slot.live is not None for slot in behind.slots.values()):
        behind.carrier = _carrier(group, behind)
    return group if behind.carrier is None else behind.carrier


def _carrier(group: Any, behind: Reloadable) -> Any:
    """Create a group of the live backends of ``group``. No communication."""
    carrier: Any = dist.ProcessGroup(group.get_group_store(), group.rank(), group.size())
    config = c10d.BackendConfig(c10d.Backend(c10d._world.pg_backend_config[group]))
    kinds = c10d.Backend.backend_type_map
    for device, name in config.get_device_backend_map().items():
        carrier._register_backend(torch.device(device), kinds[name], behind.slots[name].live)
    carrier._set_default_backend(kinds[group.name()])
    carrier._set_group_name(group.group_name)
    carrier._set_group_desc(group.group_desc)
    return carrier


def forget() -> None:
    """Drop groups that were destroyed."""
    for group in [group for group in _behind if group not in c10d._world.pg_map]:
        del _behind[group]


def check_removable(w: Wrapper | None, *, replaced: bool) -> None:
    """Raise ``CollectiveError`` if removing the wrapper would leave groups unable to execute ops."""
    forget()
    if w is None or not w.spec.release or not _behind or (replaced and not w.released):
        return
    fix = (
        "rebuild them first, in a phase of slime_like.distributed.wrapper.install.phase"
        if replaced
        else ("destroy them first (torch.distributed.destroy_process_group)")
    )
    raise CollectiveError(
        f"the wrapper cannot be removed while {len(_behind)} groups have releasable communicators (guard.release=true), which "
        f"would refuse every op: {fix}"
    )


def release(w: Wrapper) -> None:
    """Destroy the communicators of every group, including the world's. A collective: every rank calls it.

    Raises ``CollectiveError`` if an op has not ended.
    """
    if w.released or not dist.is_initialized() or not _behind:
        return
    w.settle()
    works = [(counter, ref()) for _, (ref, counter, _) in w.loose.items()]
    if flying := sorted({c.op.name for c, work in works if work is not None and not work.is_completed()}):
        raise CollectiveError(f"communicators cannot be released while {', '.join(flying)} has not ended: wait for it")
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()
    dist.barrier()
    started = time.perf_counter_ns()
    _tidy(dist.distributed_c10d._get_default_store())
    w.released = tuple(_behind)
    for table in w.tables.values():
        for group in w.released:
            counter = table.pop(group, None)
            if counter is not None:
                w.parked[counter.op.name, group] = counter
                counter.target = None
    for group in reversed(w.released):
        _behind[group].carrier = None
        for slot in _behind[group].slots.values():
            slot.drop()
    w.reload_ns += time.perf_counter_ns() - started


def rebuild(w: Wrapper) -> None:
    """Rebuild the communicators, in the order in which their groups were created. A collective: every rank calls it.

    All ranks created their groups in one order, so that common members of any two overlapping groups build the same one
    first, which excludes a deadlock. Raises ``CollectiveError`` if a rank does not join.
    """
    started, number = time.perf_counter_ns(), next(_numbers)
    w.ring.rebuilding(number)
    for group in w.released:
        for slot in _behind[group].slots.values() if group in _behind else ():
            try:
                slot.build(number)
            except RuntimeError as error:
                info = w.know(group).info
                first = (str(error).strip().splitlines() or [type(error).__name__])[0]
                readings = {} if w.ring.folder is None else read_rings(w.ring.folder)
                raise CollectiveError(
                    f"communicators of group {info.label} (ranks {', '.join(map(str, info.ranks))}) could not be created again "
                    f"for phase {w.phase_name} on rank {dist.get_rank()} (rebuild #{number}, no payload): "
                    f"{missing(readings, info.ranks, w.name, number)}; {first}\n{memory(w)}"
                ) from error
    w.released = ()
    for (op, group), counter in w.parked.items():
        if group in _behind:
            counter.target = target(group)
            w.tables[op][group] = counter
    w.parked.clear()
    w.generation += 1
    w.reload_ns += time.perf_counter_ns() - started


def _tidy(store: Any) -> None:
    """Delete the addresses of the current communicators, which all ranks have read, from the store."""
    while hasattr(store, "underlying_store"):
        store = store.underlying_store
    if dist.get_rank() == 0 and isinstance(store, dist.TCPStore):
        for key in store.list_keys():
            if f"/{MARK}" in key:
                store.delete_key(key)
