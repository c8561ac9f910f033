"""Remote experts: a worker process on this or another machine holds some of the routed experts of each layer in its memory.

An engine sends a worker the hidden states of the tokens that are routed to the worker's experts, computes the other experts in
the meantime, and adds both sums. The design follows the remote expert compute of Luce-Org/lucebox (pull request 388): tokens
are grouped by their number of remote experts, and a prefill chunk takes a few large requests instead of many small ones.
Inactive unless ``SLIME_LIKE_SGLANG`` names ``remote_experts`` or the server has a flag ``--remote-experts-...``.
"""

from __future__ import annotations

import sys

from slime_like_plugins.plugin_names import REMOTE_EXPERTS
from slime_like_plugins.sglang_hooks import enabled, record_loaded


def load() -> None:
    """Entry point ``sglang.srt.plugins``. A server that is started by hand enables the plugin with a flag."""
    from slime_like_plugins.remote_experts import flags

    if flags.is_used(sys.argv[1:]):
        flags.enable(sys.argv[1:], REMOTE_EXPERTS)
        flags.install(REMOTE_EXPERTS)
    if enabled(REMOTE_EXPERTS):
        from slime_like_plugins.remote_experts import hooks

        hooks.install()
        record_loaded(REMOTE_EXPERTS)
