"""Decode context parallelism (DCP): the KV cache of each sequence is spread over a group of tensor-parallel ranks.

SGLang has the groups, the wider page table and Triton attention for GPUs. This package adds attention on a CPU
(``attention``) and FlashInfer attention on GPUs (``flashinfer_attention``), measures the exchanges (``exchange_time``), and
stops an engine whose resolved arguments do not work with DCP (``hooks``). It is inactive unless ``SLIME_LIKE_SGLANG`` names
``dcp``, which slime_like adds if ``rollout.dcp``, or the size that the plan chooses for ``auto``, is above 1.

Token ``p`` of a sequence belongs to rank ``p % dcp`` of its group. SGLang's page table has ``dcp`` slots for each row of a
rank's pool: slot ``s`` is row ``s // dcp`` of the pool of rank ``s % dcp``.
"""

from __future__ import annotations

from slime_like_plugins.plugin_names import DCP
from slime_like_plugins.sglang_hooks import enabled, record_loaded


def load() -> None:
    """Install the plugin's hooks if ``SLIME_LIKE_SGLANG`` names ``dcp``.

    SGLang calls this function in every process (entry point ``sglang.srt.plugins``). Raises ``SystemExit`` if a hook
    does not fit SGLang.
    """
    if enabled(DCP):
        from slime_like_plugins.dcp import hooks

        hooks.install()
        record_loaded(DCP)
