"""State of the wrapped collectives of this process: groups, counters, the ring's records, and asynchronous ops.

``torch_patches`` replaces torch's methods, and ``op_wrappers`` has their wrappers, which count and record each op here.
"""

# torch has no public registry of process groups and backends.
# pyright: reportPrivateUsage=false
from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Generator
from dataclasses import dataclass, field
from threading import get_ident
from time import perf_counter_ns as clock
from typing import Any

import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from slime_like.config.schema.collectives import GROUP_LABELS, Op
from slime_like.config.schema.guard_policy import GuardSpec
from slime_like.distributed.forensics.ring import (
    CODES,
    ENDED,
    FAILED,
    GROUP_SHIFT,
    OP_BITS,
    PHASE_BITS,
    GroupInfo,
    Ring,
)
from slime_like.distributed.guard.counters import Counter, GroupRecord, counter_type, sequence_counter
from slime_like.distributed.guard.memory_guard import Guard
from slime_like.distributed.wrapper import releasable
from slime_like.errors import CollectiveError

MAX_PENDING = 1024  # with more pending works, those that have been deleted are removed
PHASE_MASK = ((1 << PHASE_BITS) - 1) << OP_BITS
# An asynchronous op: weak reference to its work, its counter, its index in the ring.
PendingWork = tuple[Any, Counter, int]


@dataclass(slots=True)
class Wrapper:
    """State of the wrapped collectives of this process, created by ``wrapper.install``. Its fields change with every op."""

    spec: GuardSpec
    ring: Ring
    guard: Guard
    explain: Callable[[Wrapper, Counter, int, BaseException], BaseException]  # returns a failed op's error with context
    groups: dict[Any, GroupRecord] = field(default_factory=dict[Any, GroupRecord])  # by ProcessGroup
    # op name -> group -> counter
    counters_by_op: dict[str, dict[Any, Counter]] = field(default_factory=dict[str, dict[Any, Counter]])
    # Asynchronous ops that nobody has waited for, by id(work); with the hot path in C the table of csrc/works.h.
    pending_works: dict[int, PendingWork] = field(default_factory=dict[int, PendingWork])
    torch_wait: Callable[[Any], Any] = c10d.Work.wait
    name: str = ""  # role and rank, such as trainer_rank0
    # Labels of groups with ranks outside this world, by group name.
    labels: dict[str, str] = field(default_factory=dict[str, str])
    released: tuple[Any, ...] = ()  # groups without communicators, in order of creation
    released_counters: dict[tuple[str, Any], Counter] = field(default_factory=dict[tuple[str, Any], Counter])
    generation: int = 0  # number of times that communicators were rebuilt
    reload_ns: int = 0  # time of releases and rebuilds
    native_ring: Any = None  # the ring of the hot path in C; None: the hot path is in Python
    counter_class: type[Counter] = field(default_factory=counter_type)
    make_sequence: Callable[[], Callable[[], int]] = sequence_counter
    is_installed: bool = False
    phase: int = 0  # phase of the step, encoded as in the ring
    phase_name: str = ""
    _composite_thread: int = 0

    def close(self) -> None:
        """Close the ring, and the guard's ``SymmetricActions`` if it has one. Call this after ``TorchPatches.restore``."""
        self.ring.before_close()
        if self.guard.symmetric_actions is not None:
            self.guard.symmetric_actions.close()
        self.ring.close()

    # ---- groups and counters -------------------------------------------------------------------------------------
    def add_counter(self, op: Op, group: Any) -> Counter:
        """Create and return the counter of ``op`` in ``group``, at the first call of the op in that group.

        Raises ``CollectiveError`` if the group's communicators are released.
        """
        record = self.group_record(group)
        if group in self.released:
            raise CollectiveError(
                f"{op.name} in group {record.info.label}, phase {self.phase_name}: its communicators are released "
                "(guard.release=true); issue this op in a phase of slime_like.distributed.wrapper.install.phase"
            )
        code = CODES[op.name] | self.phase | record.info.number << GROUP_SHIFT
        counter = self.counter_class(op, record, self.spec.policy(op.name, record.info.label), code)
        counter.target = releasable.target(group)
        self.guard.add_counter(counter)
        self.counters_by_op[op.name][group] = counter
        return counter

    def group_record(self, group: Any) -> GroupRecord:
        """Return the record of a group, created at its first op."""
        record = self.groups.get(group)
        if record is None:
            for destroyed_group in [g for g in self.groups if g not in c10d._world.pg_map]:
                self.drop_group(destroyed_group)
            record = self.groups[group] = GroupRecord(self._info(group), self.make_sequence)
            if self.guard.symmetric_actions is not None and self.spec.nodes > 1 and dist.is_initialized():
                self.guard.symmetric_actions.connect(c10d._get_default_store())
            self.ring.add_group(record.info)
        return record

    def _info(self, group: Any) -> GroupInfo:
        name, desc = str(group.group_name), str(group.group_desc)
        label = self.labels.get(name) or GROUP_LABELS.get(desc) or (desc if desc != "undefined" else name).lower()
        ranks = c10d._world.pg_group_ranks.get(group, {})
        order = tuple(sorted(ranks, key=lambda rank: ranks[rank]))
        return GroupInfo(self.ring.num_groups, name, label, order, foreign=name in self.labels)

    def drop_group(self, group: Any) -> None:
        """Drop the counters and releasable backends of a destroyed group.

        Counts since the last call of ``install.drain`` are lost. The group's ops in flight are recorded as failed: gloo may never
        complete them, and the watchdog would then end this process.
        """
        if (record := self.groups.pop(group, None)) is not None:
            self.ring.fail_in_flight(record.info.number)
        releasable.drop_destroyed_groups()
        for key in [key for key in self.released_counters if key[1] is group]:
            self.guard.remove_counter(self.released_counters.pop(key))
        for group_counters in self.counters_by_op.values():
            counter = group_counters.pop(group, None)
            if counter is not None:
                self.guard.remove_counter(counter)

    def counters(self) -> list[Counter]:
        """Return all counters, sorted by group and op."""
        all_counters = [counter for by_group in self.counters_by_op.values() for counter in by_group.values()]
        all_counters += self.released_counters.values()
        return sorted(all_counters, key=lambda c: (c.group.info.label, c.op.name))

    def set_phase(self, name: str) -> None:
        """Assign all ops from now on to the phase ``name``."""
        self.phase_name, self.phase = name, self.ring.phase_number(name) << OP_BITS
        for counter in self.counters():
            counter.code = counter.code & ~PHASE_MASK | self.phase

    @property
    def composite_thread(self) -> int:
        """Id of the thread that is in a composite function (one that issues several ops), or 0."""
        return self._composite_thread if self.native_ring is None else self.native_ring.composite_thread

    @composite_thread.setter
    def composite_thread(self, thread: int) -> None:
        if self.native_ring is None:
            self._composite_thread = thread
        else:
            self.native_ring.composite_thread = thread

    # ---- asynchronous ops and ends of ops -------------------------------------------------------------------
    def add_pending(self, work: Any, counter: Counter, index: int, start_ns: int) -> Any:
        """Register the ``work`` of an asynchronous op, which its caller may wait for later or never. Return ``work``."""
        deleted_work = self.pending_works.get(id(work))  # a deleted work whose id ``work`` has reused
        if deleted_work is not None:
            self._record_unawaited_end(deleted_work[2], start_ns)
        self.pending_works[id(work)] = (weakref.ref(work), counter, index)
        if len(self.pending_works) > MAX_PENDING:
            self.record_completed()
        counter.ns += clock() - start_ns
        return work

    def record_end(self, index: int, time_ns: int) -> None:
        """Record in the ring that op ``index`` ended at ``time_ns``, unless a later op has overwritten its record."""
        start = self.ring.first_word(index)
        if self.ring.words[start] == index:
            self.ring.words[start + ENDED] = time_ns

    def _record_unawaited_end(self, index: int, time_ns: int) -> None:
        """Record that op ``index``, for which nobody waited, had ended by ``time_ns``, unless its end was recorded earlier."""
        if not self.ring.words[self.ring.first_word(index) + ENDED]:
            self.record_end(index, time_ns)

    def record_failure(self, counter: Counter, index: int, error: BaseException) -> BaseException:
        """Record that an op failed. Return the error to raise: a ``CollectiveError`` for a ``RuntimeError``, else ``error``."""
        self.record_end(index, FAILED)
        if isinstance(error, CollectiveError) or not isinstance(error, RuntimeError):
            return error
        explained_error = self.explain(self, counter, index, error)
        explained_error.__cause__ = error
        return explained_error

    def record_completed(self) -> None:
        """Record the end of asynchronous ops that completed, or whose work was deleted, without anyone waiting for them."""
        for key, (ref, _, index) in list(self.pending_works.items()):
            work = ref()
            if work is None or work.is_completed():
                self._record_unawaited_end(index, clock())
            if (
                work is None and (current := self.pending_works.get(key)) and current[2] == index
            ):  # else a newer work has this id
                self.pending_works.pop(key, None)

    @contextlib.contextmanager
    def in_composite(self, counter: Counter, index: int, start_ns: int) -> Generator[None]:
        """Record the end of the composite function that runs in the block. ``counter`` and ``index`` are those of the function.

        The ops that this thread issues in the block are not guarded. If the block fails, the error that ``record_failure``
        returns is raised.
        """
        outer, self.composite_thread = self.composite_thread, get_ident()
        try:
            yield
            self.record_end(index, clock())
        except BaseException as error:  # noqa: BLE001 (fault boundary: any error ends the op and is raised again)
            explained_error = self.record_failure(counter, index, error)
            raise explained_error from explained_error.__cause__
        finally:
            self.composite_thread = (
                outer if outer == get_ident() else 0
            )  # another thread may have left its composite since
            counter.ns += clock() - start_ns
