"""Plugins for the KV cache of an engine: counts of its use, admission of requests, and its size after a restart.

``kv_usage`` records peak use and retractions in the scheduler; ``/server_info`` returns the counts. ``kv_admission``
(``rollout.max_running_requests=auto``) replaces SGLang's guess of how many tokens running requests will still need. ``kv_size``
is for an engine that restarts on a GPU next to a trainer: the cache is as large as at the first start, if enough memory is free.
"""

from __future__ import annotations

from slime_like_plugins.plugin_names import KV_ADMISSION, KV_SIZE, KV_USAGE
from slime_like_plugins.sglang_hooks import enabled, record_loaded


def load() -> None:
    """Install the hooks of each plugin of this package that ``SLIME_LIKE_SGLANG`` names.

    SGLang calls this function in every process (entry point ``sglang.srt.plugins``). Raises ``SystemExit`` if a hook
    does not fit SGLang.
    """
    if enabled(KV_USAGE):
        from slime_like_plugins.kv_capacity import usage

        usage.install()
        record_loaded(KV_USAGE)
    if enabled(KV_ADMISSION):
        from slime_like_plugins.kv_capacity import admission

        admission.install()
        record_loaded(KV_ADMISSION)
    if enabled(KV_SIZE):
        from slime_like_plugins.kv_capacity import size

        size.install()
        record_loaded(KV_SIZE)
