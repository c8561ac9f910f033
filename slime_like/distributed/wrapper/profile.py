"""Measurement of the memory that each op takes (``guard.profile``): free and held memory before and after the op.

Every op is measured and none is guarded. Each rank writes its rows to a file that ``slime_like.distributed.guard.advice``
reads. An asynchronous op is measured while it is issued, which is when communicators and buffers are created. A function that
issues several ops is measured as one op, and each of its ops is measured too.
"""

from __future__ import annotations

import contextlib
import functools
import time
from collections.abc import Callable, Generator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from slime_like.config.schema.collectives import Op
from slime_like.distributed.guard.advice import MeasuredOp, write_rows
from slime_like.distributed.wrapper import op_wrappers
from slime_like.distributed.wrapper.wrapper import Wrapper


@dataclass(slots=True)
class MemoryDelta:
    """Maximum memory that one op in one group took, in bytes; a call that released memory counts as 0.

    ``first_*``: maximum over the first call and each call with a larger payload than any call before it, because buffers may
    grow in such a call. ``later_*``: maximum over all other calls.
    """

    first_allocator: int = 0
    first_driver: int = 0
    later_allocator: int = 0
    later_driver: int = 0
    calls: int = 0
    query_ns: int = 0
    max_num_bytes: int = -1  # largest payload so far

    def add(self, allocator: int, driver: int, query_ns: int, num_bytes: int) -> None:
        """Add a call with a payload of ``num_bytes``. ``query_ns``: duration of one query of free memory.

        ``allocator``: growth of the memory that the process holds. ``driver``: drop of free memory.
        """
        self.calls += 1
        self.query_ns += query_ns
        if num_bytes > self.max_num_bytes:
            self.max_num_bytes = num_bytes
            self.first_allocator = max(self.first_allocator, allocator)
            self.first_driver = max(self.first_driver, driver)
        else:
            self.later_allocator = max(self.later_allocator, allocator)
            self.later_driver = max(self.later_driver, driver)


@dataclass(slots=True)
class Profile:
    """The measurements of one rank."""

    # (group, op name) -> memory
    deltas: dict[tuple[Any, str], MemoryDelta] = field(default_factory=dict[tuple[Any, str], MemoryDelta])

    def wrap_method(self, w: Wrapper, op: Op, call: Callable[..., Any]) -> Callable[..., Any]:
        """Return ``call``, a wrapped method of ``ProcessGroup``, with a memory query before and after it."""

        @functools.wraps(call)
        def measured_call(group: Any, *args: Any, **kwargs: Any) -> Any:
            with self._measuring(w, op, group):
                return call(group, *args, **kwargs)

        return measured_call

    def wrap_composite(self, w: Wrapper, op: Op, raw: Callable[..., Any], call: Callable[..., Any]) -> Any:
        """Return ``call``, the wrapper around the composite function ``raw``, with a memory query before and after."""
        position = op_wrappers.group_position(raw)

        @functools.wraps(raw)
        def measured_call(*args: Any, **kwargs: Any) -> Any:
            with (
                self._measuring(w, op, op_wrappers.group_of(position, args, kwargs))
                if w.is_installed
                else contextlib.nullcontext()
            ):
                return call(*args, **kwargs)

        return measured_call

    @contextlib.contextmanager
    def _measuring(self, w: Wrapper, op: Op, group: Any) -> Generator[None]:
        source, counters = w.guard.source, w.counters_by_op[op.name]
        bytes_before = counters[group].bytes if group in counters else 0
        held_before = source.process_bytes()
        start_ns = time.perf_counter_ns()
        free_before = source.free()
        query_ns = time.perf_counter_ns() - start_ns
        try:
            yield
        finally:
            if group in counters:  # else the op was refused, or belongs to no group of the wrapper
                free_after, held_after = source.free(), source.process_bytes()
                delta = self.deltas.setdefault((group, op.name), MemoryDelta())
                num_bytes = counters[group].bytes - bytes_before
                delta.add(held_after - held_before, free_before - free_after, query_ns, num_bytes)

    def write(self, w: Wrapper, folder: Path, name: str) -> None:
        """Write the measurements so far of all groups that still exist to ``folder/<name>.json``."""
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
                        query_ns=delta.query_ns // delta.calls,
                        first_allocator=delta.first_allocator,
                        first_driver=delta.first_driver,
                        later_allocator=delta.later_allocator,
                        later_driver=delta.later_driver,
                    )
                )
        write_rows(folder / f"{name}.json", rows)
