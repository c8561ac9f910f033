"""Communicators that come and go: destroyed while nothing is communicated, made again before something is.

megatron-core keeps its ``ProcessGroup`` objects, the world's included: they stay what and where they are, with their ranks,
names and stores. Under ``guard.release`` they never hold a communicator. In each stands a ``Slot``, and what carries out
their ops is a second group of the same ranks that only the wrapper knows. An op that comes past the wrapper meets the
slot, which refuses it.

Goes when torch's backends can all be suspended and resumed (``Backend.suspend``: in 2.14 not gloo's).
"""

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
# Methods that are no ops and must reach the group that carries the ops out.
REDIRECTED = ("_start_coalescing", "_get_backend")
MARK = "rebuild"
# Of this process's rebuilds, the same on every rank: addresses of earlier ones must not be met in the store.
_numbers = itertools.count(1)


class Slot(c10d_core.Backend):
    """Stands in a ``ProcessGroup`` for a backend that may be gone; ``live`` is the backend."""

    def __init__(self, create: Callable[[Any, Any], Any], asked: Any, options: Any) -> None:
        super().__init__(asked.group_rank, asked.group_size)
        self._create, self._options, self._store = create, options, asked.store
        self._asked = (asked.group_rank, asked.group_size, asked.timeout, asked.group_id)
        self._ranks = list(asked.global_ranks_in_group)
        self.live: Any = create(asked, options)

    def build(self, number: int) -> None:
        """Communicators again: a collective of the group's ranks where the backend connects at once, as gloo does."""
        asked: Any = c10d._DistributedBackendOptions()
        asked.store = dist.PrefixStore(f"{MARK}{number}/", self._store)
        asked.group_rank, asked.group_size, asked.timeout, asked.group_id = self._asked
        asked.global_ranks_in_group = self._ranks
        self.live = self._create(asked, self._options)

    def drop(self) -> None:
        """No communicators. Gloo's go with the last reference, NCCL's must be told to."""
        live, self.live = self.live, None
        if live is not None:
            live.shutdown()

    # What torch asks of a backend beside ops.
    def getBackendName(self) -> str:
        """Told by the error of an op that comes past the wrapper."""
        return "of a group whose communicators come and go (guard.release=true), called past slime_like's wrapper,"

    @property
    def options(self) -> Any:
        """The live backend's."""
        return self.live.options

    @property
    def supports_coalescing(self) -> bool:
        """As the live backend."""
        return bool(self.live.supports_coalescing)

    def shutdown(self) -> None:
        """The group is destroyed."""
        self.drop()

    def abort(self) -> None:
        """The group is given up."""
        live, self.live = self.live, None
        if live is not None:
            live.abort()


@dataclass(slots=True, eq=False)
class Reloadable:
    """What stands behind one ``ProcessGroup``."""

    slots: dict[str, Slot] = field(default_factory=dict[str, Slot])  # by the backend's name
    carrier: Any = None  # the group that carries the ops out; made at the first, anew after a rebuild


_behind: dict[Any, Reloadable] = {}  # by ProcessGroup, in the order of their making, which is the same on all ranks


def place() -> list[tuple[str, Any]]:
    """Groups that are made from now on have slots; returns what ``restore`` needs."""
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
    """Groups that are made from now on hold their communicators themselves."""
    for name, plugin in stock:
        c10d.Backend._plugins[name] = plugin


def _creator(name: str, stock: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    """torch's own for groups with processes outside this world, and for those split from another; else a slot's."""

    def create(asked: Any, options: Any) -> Any:
        foreign = not asked.global_ranks_in_group and dist.is_initialized()
        if foreign or asked.split_from is not None:
            return stock(asked, options)
        slot = Slot(stock, asked, options)
        _behind.setdefault(asked.process_group, Reloadable()).slots[name] = slot
        return slot

    return create


def target(group: Any) -> Any:
    """What carries out the ops of ``group``: itself, unless its communicators come and go."""
    behind = _behind.get(group)
    if behind is None or group not in c10d._world.pg_backend_config:
        return group
    if behind.carrier is None and all(slot.live is not None for slot in behind.slots.values()):
        behind.carrier = _carrier(group, behind)
    return group if behind.carrier is None else behind.carrier


def _carrier(group: Any, behind: Reloadable) -> Any:
    """A group of the live backends of ``group``. No communication."""
    made: Any = dist.ProcessGroup(group.get_group_store(), group.rank(), group.size())
    config = c10d.BackendConfig(c10d.Backend(c10d._world.pg_backend_config[group]))
    kinds = c10d.Backend.backend_type_map
    for device, name in config.get_device_backend_map().items():
        made._register_backend(torch.device(device), kinds[name], behind.slots[name].live)
    made._set_default_backend(kinds[group.name()])
    made._set_group_name(group.group_name)
    made._set_group_desc(group.group_desc)
    return made


def forget() -> None:
    """Groups that were destroyed."""
    for group in [group for group in _behind if group not in c10d._world.pg_map]:
        del _behind[group]


def check_removable(w: Wrapper | None, *, replaced: bool) -> None:
    """Raises ``CollectiveError`` where groups would be left without what carries out their ops."""
    forget()
    if w is None or not w.spec.release or not _behind or (replaced and not w.released):
        return
    how = (
        "rebuild them first, in a phase of slime_like.distributed.wrapper.install.phase"
        if replaced
        else ("destroy them first (torch.distributed.destroy_process_group)")
    )
    raise CollectiveError(
        f"the wrapper cannot go while {len(_behind)} groups have communicators that come and go (guard.release=true), "
        f"which would refuse every op: {how}"
    )


def release(w: Wrapper) -> None:
    """Destroy the communicators of every group of this world, its own included. A collective: every rank calls it.

    Raises ``CollectiveError`` when an op has not ended.
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
    """Make the communicators again, in the order in which their groups were made. A collective: every rank calls it.

    All ranks made their groups in one order, so that of any two groups that overlap all common members build the same
    one first: nobody waits in a circle. Raises ``CollectiveError`` where a rank does not come.
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
                    f"communicators of group {info.label} (ranks {', '.join(map(str, info.ranks))}) could not be made again "
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
    """Addresses of the communicators that are in use now, which all ranks have read, leave the store."""
    while hasattr(store, "underlying_store"):
        store = store.underlying_store
    if dist.get_rank() == 0 and isinstance(store, dist.TCPStore):
        for key in store.list_keys():
            if f"/{MARK}" in key:
                store.delete_key(key)
