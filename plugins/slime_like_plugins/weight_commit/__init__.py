"""Weight updates that fail unless they are complete.

SGLang's loaders skip unknown names and write parts of fused parameters one by one; a push without ``v_proj`` of one
layer would report success. If ``SLIME_LIKE_SGLANG`` names ``weight_commit``, ``begin_weight_update`` fills every
floating-point parameter with NaN, and ``end_weight_update`` fails if any NaN remains.

``dequantise`` is for checkpoints with float8 weights: the engine, like the trainer, multiplies them by their scales and
keeps the results in ``model.dtype``, the dtype of pushed weights.
"""

from __future__ import annotations

from slime_like_plugins.plugin_names import DEQUANTISE, WEIGHT_COMMIT
from slime_like_plugins.sglang_hooks import enabled, record_loaded


def load() -> None:
    """Install ``weight_commit`` (hooks and config classes) and ``dequantise``, each if ``SLIME_LIKE_SGLANG`` names it.

    SGLang calls this function in every process (entry point ``sglang.srt.plugins``). Raises ``SystemExit`` if a hook
    does not fit SGLang.
    """
    if enabled(WEIGHT_COMMIT):
        from slime_like_plugins.weight_commit import hooks, model_types

        hooks.install()
        model_types.register()
        record_loaded(WEIGHT_COMMIT)
    if enabled(DEQUANTISE):
        from slime_like_plugins.weight_commit import dequantise

        dequantise.install()
        record_loaded(DEQUANTISE)
