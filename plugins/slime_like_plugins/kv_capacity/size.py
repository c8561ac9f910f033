"""Hook that keeps an engine's KV cache as large as at the first start when the engine restarts next to a trainer.

Of the memory that is free before it loads, SGLang leaves the share ``1 - mem_fraction_static`` to other processes and fills
the rest. Here, memory that a trainer has taken since the first start is deducted from the others' share, down to a minimum,
before the KV cache shrinks. Memory that another process has released since is added to the others' share.
"""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Callable
from typing import Any

from slime_like.printable import visible
from slime_like.rollout.engine.free_memory import FIRST_FREE, FREE_LINE
from slime_like_plugins.plugin_names import KV_SIZE
from slime_like_plugins.sglang_hooks import Hook
from slime_like_plugins.sglang_hooks import install as install_hooks

MIN_SHARE = 0.02  # minimum share left to others of the GPU memory that was free at the first start


def baseline_of_first_start(free: float, first_free: float, static: float) -> float:
    """Return the free GiB to report to SGLang, so that it fills as much memory as at the first start.

    SGLang leaves ``1 - static`` of the result to others. ``first_free`` GiB were free at the first start; ``free`` GiB are free
    at this one. At least ``MIN_SHARE`` of ``first_free`` is left to others, so SGLang may fill less than at the first start.
    """
    remainder = free - static * first_free
    return max(remainder, MIN_SHARE * first_free) / (1 - static)


def measure(original: Callable[..., float], *args: Any, **kwargs: Any) -> float:
    """Hook around ``measure_pre_model_load_memory``: log the free GiB, and after a restart return ``baseline_of_first_start``.

    The measurement for a draft model, which loads later and does not determine the size of the cache, is returned unchanged.
    """
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

install = functools.partial(install_hooks, KV_SIZE, HOOKS)
