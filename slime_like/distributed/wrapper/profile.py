"""Memory taken by each op: free memory of the driver and memory held by this process, before and after it.

Under ``guard.profile`` every op is measured, nothing is guarded, and each rank's rows go to a file that
``slime_like.distributed.guard.advice`` reads. An asynchronous op is measured when it is issued, which creates communicators
and buffers. A function made of several ops is measured as one, in addition to its ops.
"""

from __future__ import annotations

import contextlib
import functools
import time
from collections.abc import Callable, Generator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from slime_like.config.schema.collectives import Op
from slime_like.distributed.guard.advice import MeasuredOp, write_rows
from slime_like.distributed.wrapper import calls

if TYPE_CHECKING:
    from slime_like.distributed.wrapper.wrapper import Wrapper


@dataclass(slots=True)
class MemoryDelta:
    """Memory taken by one op in one group, in bytes; released memory counts as 0.

    First use: the first call, and each call with a larger payload than any before it, for which buffers may grow.
    """

    first_allocator: int = 0
    first_driver: int = 0
    later_allocator: int = 0
    later_driver: int = 0
    calls: int = 0
    question_ns: int = 0
    largest: int = -1

    def add(self, allocator: int, driver: int, question_ns: int, num_bytes: int) -> None:
        """Add a call with a payload of ``num_bytes``."""
        self.calls += 1
        self.question_ns += question_ns
        if num_bytes > self.largest:
            self.largest = num_bytes
            self.first_allocator = max(self.first_allocator, allocator)
            self.first_driver = max(self.first_driver, driver)
        else:
            self.later_allocator = max(self.later_allocator, allocator)
            self.later_driver = max(self.later_driver, driver)


@dataclass(slots=True)
class Profile:
    """The measurements of one rank."""

    # By group and op.
    deltas: dict[tuple[Any, str], MemoryDelta] = field(default_factory=dict[tuple[Any, str], MemoryDelta])

    def measured(self, w: Wrapper, op: Op, call: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap ``call``, a wrapped method of ``ProcessGroup``, in two memory queries."""

        @functools.wraps(call)
        def around(group: Any, *args: Any, **kwargs: Any) -> Any:
            with self._measuring(w, op, group):
                return call(group, *args, **kwargs)

        return around

    def measured_composite(self, w: Wrapper, op: Op, raw: Callable[..., Any], call: Callable[..., Any]) -> Any:
        """Wrap ``call``, the wrapper of the composite function ``raw``, in two memory queries."""
        place = calls.group_place(raw)

        @functools.wraps(raw)
        def around(*args: Any, **kwargs: Any) -> Any:
            with self._measuring(w, op, calls.group_of(place, args, kwargs)) if w.placed else contextlib.nullcontext():
                return call(*args, **kwargs)

        return around

    @contextlib.contextmanager
    def _measuring(self, w: Wrapper, op: Op, group: Any) -> Generator[None]:
        source, table = w.guard.source, w.tables[op.name]
        carried = table[group].bytes if group in table else 0
        held_before = source.held()
        started = time.perf_counter_ns()
        free_before = source.free()
        query_ns = time.perf_counter_ns() - started
        try:
            yield
        finally:
            if group in table:  # else not an op of this group, or refused
                free_after, held_after = source.free(), source.held()
                delta = self.deltas.setdefault((group, op.name), MemoryDelta())
                delta.add(held_after - held_before, free_before - free_after, query_ns, table[group].bytes - carried)

    def write(self, w: Wrapper, folder: Path, name: str) -> None:
        """Write all measurements so far to ``folder/<name>.json``."""
        rows: list[MeasuredOp] = []
        for counter in w.counters():
            group = next((handle for handle, group in w.groups.items() if group is counter.group), None)
            delta = self.deltas.get((group, counter.op.name))
            if delta is not None and counter.calls:
                rows.append(
                    MeasuredOp(
                        op=counter.op.name,
                        group=counter.group.info.label,
                        source=w.guard.source.name,
                        calls=counter.calls,
                        num_bytes=counter.bytes,
                        time_ns=counter.ns,
                        question_ns=delta.question_ns // delta.calls,
                        first_allocator=delta.first_allocator,
                        first_driver=delta.first_driver,
                        later_allocator=delta.later_allocator,
                        later_driver=delta.later_driver,
                    )
                )
        write_rows(folder / f"{name}.json", rows)
