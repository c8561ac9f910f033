"""Free device memory at an engine's first start, by which a restarted engine sizes its KV cache (plugin ``kv_size``)."""

from __future__ import annotations

import re

FIRST_FREE = "SLIME_LIKE_FIRST_FREE_GIB"  # environment of a restarted engine
FREE_LINE = "slime_like: "  # begin of the line in the engine's log
_FREE = re.compile(rf"^{FREE_LINE}(\d+\.\d+) GiB free before the load$", re.MULTILINE)


def free_gib(log: str) -> float | None:
    """Return the free GiB that an engine's log states, of the rank that had the least; None without a statement."""
    return min(map(float, _FREE.findall(log)), default=None)
