"""What each op takes of memory: free memory as the driver sees it and memory held by this process, before and after it.

Under ``guard.profile`` every op is measured, nothing is guarded, and each rank's rows go to a file that
``slime_like.distributed.guard.advice`` reads. An asynchronous op is measured where it is issued: that is where communicators
and buffers are made. A function made of several ops is measured as one, and they beside it.
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
    """Of one op in one group, in bytes; what an op gives back counts as nothing.

    Of first use are the first call, and each that carries more than any before it, for which buffers may have to grow.
    """

    first_allocator: int = 0
    first_driver: int = 0
    later_allocator: int = 0
    later_driver: int = 0
    calls: int = 0
    question_ns: int = 0
    largest: int = -1

    def add(self, allocator: int, driver: int, question_ns: int, num_bytes: int) -> None:
        """One more call, which carried ``num_bytes``."""
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

    taken: dict[tuple[Any, str], MemoryDelta] = field(
        default_factory=dict[tuple[Any, str], MemoryDelta]
    )  # by group, op

    def measured(self, w: Wrapper, op: Op, call: Callable[..., Any]) -> Callable[..., Any]:
        """``call``, a wrapped method of ``ProcessGroup``, between two questions."""

        @functools.wraps(call)
        def around(group: Any, *args: Any, **kwargs: Any) -> Any:
            with self._measuring(w, op, group):
                return call(group, *args, **kwargs)

        return around

    def measured_composite(self, w: Wrapper, op: Op, raw: Callable[..., Any], call: Callable[..., Any]) -> Any:
        """``call``, which is ``raw``, a function made of several ops, wrapped; between two questions."""
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
        held = source.held()
        started = time.perf_counter_ns()
        free = source.free()
        asked = time.perf_counter_ns() - started
        try:
            yield
        finally:
            if group in table:  # else it was none of this group, or refused
                left, holds = source.free(), source.held()
                taken = self.taken.setdefault((group, op.name), MemoryDelta())
                taken.add(holds - held, free - left, asked, table[group].bytes - carried)

    def write(self, w: Wrapper, folder: Path, name: str) -> None:
        """Everything measured so far to ``folder/<name>.json``."""
        rows: list[MeasuredOp] = []
        for counter in w.counters():
            group = next((group for group, known in w.groups.items() if known is counter.group), None)
            taken = self.taken.get((group, counter.op.name))
            if taken is not None and counter.calls:
                rows.append(
                    MeasuredOp(
                        op=counter.op.name,
                        group=counter.group.info.label,
                        source=w.guard.source.name,
                        calls=counter.calls,
                        num_bytes=counter.bytes,
                        time_ns=counter.ns,
                        question_ns=taken.question_ns // taken.calls,
                        first_allocator=taken.first_allocator,
                        first_driver=taken.first_driver,
                        later_allocator=taken.later_allocator,
                        later_driver=taken.later_driver,
                    )
                )
        write_rows(folder / f"{name}.json", rows)
