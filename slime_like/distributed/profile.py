"""What each op takes of memory: free memory as the driver sees it and memory held by this process, before and after it.

Under ``guard.profile`` every op is measured, nothing is guarded, and each rank's rows go to a file that
``slime_like.distributed.advice`` reads. An asynchronous op is measured where it is issued: that is where communicators
and buffers are made.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from slime_like.config.collectives import Op
from slime_like.distributed.advice import Measured, write_rows

if TYPE_CHECKING:
    from slime_like.distributed.wrapper import Wrapper


@dataclass(slots=True)
class Taken:
    """Of one op in one group, in bytes; what an op gives back counts as nothing."""

    first_allocator: int = -1
    first_driver: int = -1
    later_allocator: int = 0
    later_driver: int = 0
    calls: int = 0
    question_ns: int = 0

    def add(self, allocator: int, driver: int, question_ns: int) -> None:
        """One more call."""
        self.calls += 1
        self.question_ns += question_ns
        if self.calls == 1:
            self.first_allocator, self.first_driver = max(0, allocator), max(0, driver)
        else:
            self.later_allocator = max(self.later_allocator, allocator)
            self.later_driver = max(self.later_driver, driver)


@dataclass(slots=True)
class Profile:
    """The measurements of one rank."""

    taken: dict[tuple[Any, str], Taken] = field(default_factory=dict[tuple[Any, str], Taken])  # by group, op

    def measured(self, w: Wrapper, op: Op, call: Callable[..., Any]) -> Callable[..., Any]:
        """``call``, a wrapped method of ``ProcessGroup``, between two questions."""
        source = w.guard.source

        @functools.wraps(call)
        def around(group: Any, *args: Any, **kwargs: Any) -> Any:
            held = source.held()
            started = time.perf_counter_ns()
            free = source.free()
            asked = time.perf_counter_ns() - started
            try:
                return call(group, *args, **kwargs)
            finally:
                left, holds = source.free(), source.held()
                self.taken.setdefault((group, op.name), Taken()).add(holds - held, free - left, asked)

        return around

    def write(self, w: Wrapper, folder: Path, name: str) -> None:
        """Everything measured so far to ``folder/<name>.json``."""
        rows: list[Measured] = []
        for counter in w.counters():
            group = next((group for group, known in w.groups.items() if known is counter.group), None)
            taken = self.taken.get((group, counter.op.name))
            if taken is not None and counter.calls:
                rows.append(
                    Measured(
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
