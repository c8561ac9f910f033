"""FlowMLA: ranks of data-parallel attention hold parts of the attention weights, and gather each layer before it runs.

With data-parallel attention, ``dp`` ranks hold the same attention weights. Here each of them holds ``1 / dp`` of the weights that
``rollout.flow_mla.weights`` names in each layer, and two or more buffers (slots) that the layers share: while a layer runs, the
weights of the next ones arrive in the other slots. The memory that this frees becomes KV cache. The design follows "FlowMLA" of
Ant Group's ASystem (SGLang pull request 7005, not merged), which shards the output projection of latent attention. The plugin is
inactive unless ``SLIME_LIKE_SGLANG`` names ``flow_mla`` or the server has ``--enable-flow-mla``.
"""

from __future__ import annotations

import sys

from slime_like_plugins.plugin_names import FLOW_MLA
from slime_like_plugins.sglang_hooks import enabled, record_loaded


def load() -> None:
    """Install the plugin's hooks if ``SLIME_LIKE_SGLANG`` names ``flow_mla`` or the server has ``--enable-flow-mla``.

    The flag is for a server that is started without slime_like. SGLang calls this function in every process (entry
    point ``sglang.srt.plugins``). Raises ``SystemExit`` if a hook does not fit SGLang, or the flags are invalid or contradict
    each other.
    """
    if "--enable-flow-mla" in sys.argv:
        from slime_like_plugins.flow_mla import flags

        flags.enable(sys.argv[1:], FLOW_MLA)
        flags.install(FLOW_MLA)
    if enabled(FLOW_MLA):
        from slime_like_plugins.flow_mla import hooks

        hooks.install()
        record_loaded(FLOW_MLA)
