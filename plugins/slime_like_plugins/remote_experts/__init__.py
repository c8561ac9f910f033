"""Remote experts: a worker process, which may be on another machine, holds some of each layer's experts in its memory.

An engine sends a worker the hidden states of the tokens that are routed to the worker's experts, computes the other
experts in the meantime, and adds both sums. The design follows the remote expert compute of Luce-Org/lucebox (pull
request 388): the tokens of a large batch are grouped by their number of remote experts, and sent in a few large requests
unless the option ``mode`` selects small ones. The plugin is inactive unless ``SLIME_LIKE_SGLANG`` names
``remote_experts`` or the server has a flag ``--remote-experts-...``.
"""

from __future__ import annotations

import sys

from slime_like_plugins.plugin_names import REMOTE_EXPERTS
from slime_like_plugins.sglang_hooks import enabled, record_loaded


def load() -> None:
    """Install the plugin's hooks if ``SLIME_LIKE_SGLANG`` names ``remote_experts`` or the server has one of its flags.

    The flags are for a server that is started without slime_like. SGLang calls this function in every process (entry
    point ``sglang.srt.plugins``). Raises ``SystemExit`` if a hook does not fit SGLang, or a flag is not valid.
    """
    from slime_like_plugins.remote_experts import flags

    if flags.is_used(sys.argv[1:]):
        flags.enable(sys.argv[1:], REMOTE_EXPERTS)
        flags.install(REMOTE_EXPERTS)
    if enabled(REMOTE_EXPERTS):
        from slime_like_plugins.remote_experts import hooks

        hooks.install()
        record_loaded(REMOTE_EXPERTS)
