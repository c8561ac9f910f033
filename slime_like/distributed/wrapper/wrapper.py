"""The wrapper of every collective of this process, independent of how its caller imported the function.

All functions of ``torch.distributed`` issue their op by a method of ``ProcessGroup``. The methods are wrapped on the class,
so that functions imported before or after ``install`` and calls on a group itself are all seen once. Functions made of
several ops (``broadcast_object_list``) are wrapped as well, to be counted and guarded under their own name. Without a
wrapper torch's own methods are in place, with no pass-through layer.

Remove when torch's hooks (``ProcessGroup.register_pre_hook``, ``register_post_hook``) report every op and its failure.
"""

# torch has no public registry of process groups and backends.
# pyright: reportPrivateUsage=false
from __future__ import annotations

import contextlib
import functools
import weakref
from collections.abc import Callable, Generator
from dataclasses import dataclass, field
from threading import get_ident
from time import perf_counter_ns as clock
from typing import Any

import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from slime_like.config.schema.collectives import GROUP_LABELS, OPS, Kind, Op
from slime_like.config.schema.guard_policy import GuardSpec
from slime_like.distributed.forensics.ring import CODES, ENDED, FAILED, OP_BITS, PHASE_BITS, GroupInfo, Ring
from slime_like.distributed.guard.counters import Counter, Group, counter_type, one_by_one
from slime_like.distributed.guard.memory_guard import Guard
from slime_like.distributed.wrapper import calls, reload
from slime_like.distributed.wrapper.hot import NativeHooks
from slime_like.distributed.wrapper.profile import Profile
from slime_like.errors import CollectiveError

PHASE_MASK = ((1 << PHASE_BITS) - 1) << OP_BITS
Issued = tuple[Any, Counter, int]  # an outstanding op: its work (weak reference), counter, number in the ring


@dataclass(slots=True)
class Wrapper:
    """The wrapper of this process. Fields change with every op; only ``install`` makes one."""

    spec: GuardSpec
    ring: Ring
    guard: Guard
    explain: Callable[[Wrapper, Counter, int, BaseException], BaseException]  # adds context to a failed op's error
    groups: dict[Any, Group] = field(default_factory=dict[Any, Group])  # by ProcessGroup
    tables: dict[str, dict[Any, Counter]] = field(
        default_factory=dict[str, dict[Any, Counter]]
    )  # op -> group -> counter
    loose: dict[int, Issued] = field(default_factory=dict[int, Issued])  # asynchronous, by id(Work); csrc/works.h in C
    await_: Callable[[Any], Any] = c10d.Work.wait  # torch's own
    name: str = ""  # of the rank, with its role
    labels: dict[str, str] = field(default_factory=dict[str, str])  # of groups made elsewhere, by name
    released: tuple[Any, ...] = ()  # groups without communicators, in order of creation
    parked: dict[tuple[str, Any], Counter] = field(default_factory=dict[tuple[str, Any], Counter])  # their counters
    generation: int = 0  # of communicators
    reload_ns: int = 0  # spent on destroying and rebuilding them
    profile: Profile | None = None  # measures every op
    hot: NativeHooks | None = None  # hot path in C; None: in Python
    make_counter: type[Counter] = field(default_factory=counter_type)
    numbers: Callable[[], Callable[[], int]] = one_by_one
    placed: bool = False
    phase: int = 0  # of the step, as encoded in the ring
    phase_name: str = ""
    _composing: int = 0
    _stock: list[tuple[Any, str, Any]] = field(default_factory=list[tuple[Any, str, Any]])
    _creators: list[tuple[str, Any]] = field(default_factory=list[tuple[str, Any]])

    # ---- in and out ----------------------------------------------------------------------------------------------
    def place(self) -> None:
        """Replace torch's methods and composite functions by wrapped ones."""
        self.set_phase("start")
        self.placed = True
        if self.hot is not None:
            self.make_counter, self.numbers = counter_type(self.hot.module.Tally), self.hot.module.Number
            self.loose = self.hot.module.Works()
        for op in OPS:
            self.tables[op.name] = {}
            for name in op.methods:
                self._replace(dist.ProcessGroup, name, functools.partial(self._method, op, name))
            for name in op.functions if op.kind is Kind.COMPOSITE else ():
                self._replace_function(name, functools.partial(self._composite, op))
        if self.spec.release:
            for name in reload.REDIRECTED:
                self._replace(dist.ProcessGroup, name, calls.redirected)
            self._creators = reload.place()
        self._replace(c10d.Work, "wait", self._wait)
        self._replace_function("destroy_process_group", functools.partial(calls.destroy, self))

    def _method(self, op: Op, name: str, raw: Callable[..., Any]) -> Callable[..., Any]:
        call = calls.method(self, op, name, raw)
        if self.hot is not None:
            call = self.hot.method(self, op, name, raw, call)
        return call if self.profile is None else self.profile.measured(self, op, call)

    def _composite(self, op: Op, raw: Callable[..., Any]) -> Callable[..., Any]:
        call = calls.composite(self, op, raw)
        if self.hot is not None:
            call = self.hot.composite(self, op, raw, call)
        return call if self.profile is None else self.profile.measured_composite(self, op, raw, call)

    def _wait(self, raw: Callable[..., Any]) -> Callable[..., Any]:
        call = calls.wait(self, raw)
        return call if self.hot is None else self.hot.wait(self, raw, call)

    def remove(self) -> None:
        """Restore torch's methods and functions."""
        self.placed = False
        for owner, name, stock in reversed(self._stock):
            setattr(owner, name, stock)
        self._stock.clear()
        reload.restore(self._creators)
        self.ring.let_go()
        if self.guard.requests is not None:
            self.guard.requests.close()
        self.ring.close()

    def _replace(self, owner: Any, name: str, wrap: Callable[[Any], Any]) -> None:
        assert name in vars(owner), f"torch has no {owner.__name__}.{name}: review slime_like.config.schema.collectives"
        self._stock.append((owner, name, vars(owner)[name]))
        setattr(owner, name, wrap(getattr(owner, name)))

    def _replace_function(self, name: str, wrap: Callable[[Any], Any]) -> None:
        """Replace a function in both modules: one re-exports the other's."""
        stock = getattr(c10d, name)
        assert getattr(dist, name) is stock, f"torch.distributed.{name} is no longer that of distributed_c10d"
        wrapped = wrap(stock)
        for module in (dist, c10d):
            self._stock.append((module, name, stock))
            setattr(module, name, wrapped)

    # ---- groups and counters -------------------------------------------------------------------------------------
    def adopt(self, op: Op, group: Any) -> Counter:
        """Create the counter of ``op`` in a group that has not called it before."""
        record = self.know(group)
        if group in self.released:
            raise CollectiveError(
                f"{op.name} in group {record.info.label}, phase {self.phase_name}: its communicators are released "
                "(guard.release=true); do this in a phase of slime_like.distributed.wrapper.install.phase"
            )
        code = CODES[op.name] | self.phase | record.info.number << (OP_BITS + PHASE_BITS)
        counter = self.make_counter(op, record, self.spec.policy(op.name, record.info.label), code)
        counter.target = reload.target(group)
        self.guard.adopt(counter)
        self.tables[op.name][group] = counter
        return counter

    def know(self, group: Any) -> Group:
        """Return the record of a group, created at its first op."""
        record = self.groups.get(group)
        if record is None:
            for destroyed in [g for g in self.groups if g not in c10d._world.pg_map]:
                self.forget(destroyed)
            record = self.groups[group] = Group(self._info(group), self.numbers)
            if self.guard.requests is not None and self.spec.nodes > 1 and dist.is_initialized():
                self.guard.requests.join(c10d._get_default_store())
            self.ring.add_group(record.info)
        return record

    def _info(self, group: Any) -> GroupInfo:
        name, desc = str(group.group_name), str(group.group_desc)
        label = self.labels.get(name) or GROUP_LABELS.get(desc) or (desc if desc != "undefined" else name).lower()
        ranks = c10d._world.pg_group_ranks.get(group, {})
        order = tuple(sorted(ranks, key=lambda rank: ranks[rank]))
        return GroupInfo(self.ring.num_groups, name, label, order, foreign=name in self.labels)

    def forget(self, group: Any) -> None:
        """Drop a destroyed group; counts that were not drained are lost."""
        self.groups.pop(group, None)
        reload.forget()
        for key in [key for key in self.parked if key[1] is group]:
            self.guard.forget(self.parked.pop(key))
        for table in self.tables.values():
            counter = table.pop(group, None)
            if counter is not None:
                self.guard.forget(counter)

    def counters(self) -> list[Counter]:
        """Return all counters, sorted by group and op."""
        all_counters = [counter for table in self.tables.values() for counter in table.values()]
        all_counters += self.parked.values()
        return sorted(all_counters, key=lambda c: (c.group.info.label, c.op.name))

    def set_phase(self, name: str) -> None:
        """Assign ops from now on to this phase of the step."""
        self.phase_name, self.phase = name, self.ring.phase(name) << OP_BITS
        for counter in self.counters():
            counter.code = counter.code & ~PHASE_MASK | self.phase

    @property
    def composing(self) -> int:
        """Id of the thread that is in a composite, or 0."""
        return self._composing if self.hot is None else self.hot.ring.composing

    @composing.setter
    def composing(self, thread: int) -> None:
        if self.hot is None:
            self._composing = thread
        else:
            self.hot.ring.composing = thread

    # ---- asynchronous ops, and the ends of ops -------------------------------------------------------------------
    def outstanding(self, work: Any, counter: Counter, index: int, started: int) -> Any:
        """Register an asynchronous op, whose ``work`` may be waited for at any time, or never."""
        dropped = self.loose.get(id(work))  # a dropped work whose id is reused
        if dropped is not None:
            self.ended(dropped[2], started)
        self.loose[id(work)] = (weakref.ref(work), counter, index)
        if len(self.loose) > calls.PURGE_AT:
            self.settle()
        counter.ns += clock() - started
        return work

    def ended(self, index: int, when: int) -> None:
        """Record in the ring when op ``index`` ended, unless a later op has overwritten it."""
        place = self.ring.place(index)
        if self.ring.words[place] == index:
            self.ring.words[place + ENDED] = when

    def failed(self, counter: Counter, index: int, error: BaseException) -> BaseException:
        """Mark an op as failed. Returns the error to raise: ``error``, explained if it is the backend's."""
        self.ended(index, FAILED)
        if isinstance(error, CollectiveError) or not isinstance(error, RuntimeError):
            return error
        explained = self.explain(self, counter, index, error)
        explained.__cause__ = error
        return explained

    def settle(self) -> None:
        """Record the end of asynchronous ops that are complete or dropped without having been waited for."""
        for key, issued in list(self.loose.items()):
            ref, _, index = issued
            work = ref()
            if work is None or work.is_completed():
                self.ended(index, clock())
            if work is None and (now := self.loose.get(key)) and now[2] == index:  # else the id is reused
                self.loose.pop(key, None)

    @contextlib.contextmanager
    def composing_op(self, counter: Counter, index: int, started: int) -> Generator[None]:
        """Assign this thread's ops inside to the composite op of ``counter``."""
        outer, self.composing = self.composing, get_ident()
        try:
            yield
            self.ended(index, clock())
        except BaseException as error:  # noqa: BLE001 (fault boundary: whatever it is ends the op, and goes on)
            failed = self.failed(counter, index, error)
            raise failed from failed.__cause__
        finally:
            self.composing = outer if outer == get_ident() else 0  # only this thread's: another's may have ended
            counter.ns += clock() - started
