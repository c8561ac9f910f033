"""Device memory that was free at an engine's first start.

A restarted engine on a single node sizes its KV cache from this value (plugin ``kv_size``).
"""

from __future__ import annotations

import re

FIRST_FREE = "SLIME_LIKE_FIRST_FREE_GIB"  # environment variable of a restarted engine
FREE_LINE = "slime_like: "  # start of the line in the engine's log
_FREE = re.compile(rf"^{FREE_LINE}(\d+\.\d+) GiB free before the load$", re.MULTILINE)


def free_gib(log: str) -> float | None:
    """Return the smallest number of free GiB that a rank wrote to the engine's log; None if no rank did."""
    return min(map(float, _FREE.findall(log)), default=None)
