"""Compares formulas with a label, counting calls: ``python -m tests.reward.work``, a JSON string a line on stdin.

The kernel limits memory and CPU time, in case the work is not in calls: a process that is gone has worked too much.
"""

from __future__ import annotations

import json
import resource
import sys
import types

from slime_like.reward.latex import equal

LABEL = r"\sqrt{2}"
MOST_CALLS = 5_000_000  # of Python functions; an idle core makes about a million a second
MEMORY, CPU_S = 3 * 2**30, 120


class TooMuchWork(BaseException):
    """Not an ``Exception``: that would be a formula that is refused."""


class Counter:
    """Counts calls of Python functions, and raises beyond the limit."""

    calls = 0

    def __call__(self, code: types.CodeType, offset: int) -> None:
        self.calls += 1
        if self.calls > MOST_CALLS:
            raise TooMuchWork


def main() -> None:
    """Answer each formula with the number of calls that it took; more than ``MOST_CALLS`` where it was stopped."""
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    resource.setrlimit(resource.RLIMIT_CPU, (CPU_S, CPU_S))
    equal(LABEL, r"\frac{x}{2}")  # imports
    counter, tool = Counter(), sys.monitoring.PROFILER_ID
    sys.monitoring.use_tool_id(tool, "work")
    sys.monitoring.register_callback(tool, sys.monitoring.events.PY_START, counter)
    for line in sys.stdin:
        formula, counter.calls = json.loads(line), 0
        sys.monitoring.set_events(tool, sys.monitoring.events.PY_START)
        try:
            equal(LABEL, formula)
        except TooMuchWork:
            pass
        finally:
            sys.monitoring.set_events(tool, 0)
        sys.stdout.write(f"{counter.calls}\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
