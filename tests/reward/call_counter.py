"""Count the calls that comparing a formula takes: ``python -m tests.reward.call_counter``, one JSON string per stdin line.

Memory and CPU time are limited by the kernel, for work outside of Python calls.
"""

from __future__ import annotations

import json
import resource
import sys
import types

from slime_like.reward.latex import equal

LABEL = r"\sqrt{2}"
MAX_CALLS = 5_000_000  # calls of Python functions; an idle core makes about a million a second
MEMORY, CPU_S = 3 * 2**30, 120


class TooMuchWork(BaseException):
    """More than ``MAX_CALLS`` calls. It is not an ``Exception``, which ``equal`` would report as a rejected formula."""


class CallCounter:
    """Callback that counts calls of Python functions and raises beyond the limit."""

    calls = 0

    def __call__(self, code: types.CodeType, offset: int) -> None:
        self.calls += 1
        if self.calls > MAX_CALLS:
            raise TooMuchWork


def main() -> None:
    """Answer each formula with its number of calls; more than ``MAX_CALLS`` if it was stopped."""
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    resource.setrlimit(resource.RLIMIT_CPU, (CPU_S, CPU_S))
    equal(LABEL, r"\frac{x}{2}")  # imports
    counter, tool = CallCounter(), sys.monitoring.PROFILER_ID
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
