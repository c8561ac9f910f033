"""Hook that gives an engine which restarts next to a trainer the KV cache of its first start.

SGLang leaves ``(1 - mem_fraction_static)`` of the memory that is free before its load to others, and fills the rest. Memory that a
trainer has taken since the first start counts as taken from that share here, not from the KV cache.
"""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Callable
from typing import Any

from slime_like.printable import visible
from slime_like.rollout.engine.free_memory import FIRST_FREE, FREE_LINE
from slime_like_plugins.sglang_hooks import Hook
from slime_like_plugins.sglang_hooks import install as install_hooks

MIN_SHARE = 0.02  # of the GPU's free memory at the first start, left to others at least


def baseline_of_first_start(free: float, first_free: float, static: float) -> float:
    """Return the free GiB of which SGLang leaves ``1 - static`` to others, so that it fills as much as at the first start.

    At the first start ``first_free`` GiB were free, now ``free``.
    """
    others = (1 - static) * first_free - max(0.0, first_free - free)
    return max(others, MIN_SHARE * first_free) / (1 - static)


def measure(original: Callable[..., float], *args: Any, **kwargs: Any) -> float:
    """Hook around ``measure_pre_model_load_memory``. A draft model, which loads later, has no cache of its own size."""
    free = original(*args, **kwargs)
    if kwargs.get("is_draft_worker"):
        return free
    sys.stderr.write(visible(f"{FREE_LINE}{free:.6f} GiB free before the load\n"))
    sys.stderr.flush()
    if not (text := os.environ.get(FIRST_FREE, "")):
        return free
    from sglang.srt.runtime_context import get_schedule

    return baseline_of_first_start(free, float(text), float(get_schedule().mem_fraction_static))


HOOKS = (Hook("sglang.srt.distributed.bootstrap.measure_pre_model_load_memory", "around", measure),)

install = functools.partial(install_hooks, "kv_size", HOOKS)
