"""Reproducible sampling for RL: a seed per sample, and log-probabilities at the sampling temperature.

SGLang honours ``sampling_seed`` only in its deterministic mode, which also changes attention and communication. It
always scores *input* tokens at temperature 1. With ``rollout_sampling`` in ``SLIME_LIKE_SGLANG``,
seeds are honoured and input tokens are scored at the request's temperature, on CPU and GPU.

Seeds work with all sampling options: temperature, top-k, nucleus, min-p, penalties, biases, grammars, custom logit
processors, sampling masks. They do not work with speculative decoding, which verifies drafts in separate functions:
the engine logs a warning, and ``run.deterministic=true`` does not allow it.

If a request asks for it, the reply has base64 columns instead of lists of tokens and log-probabilities (``columns``).
"""

from __future__ import annotations

from slime_like_plugins.plugin_names import ROLLOUT_SAMPLING
from slime_like_plugins.sglang_hooks import enabled, record_loaded


def load() -> None:
    """Install the plugin's hooks if ``SLIME_LIKE_SGLANG`` names ``rollout_sampling``.

    SGLang calls this function in every process (entry point ``sglang.srt.plugins``). Raises ``SystemExit`` if a hook
    does not fit SGLang.
    """
    if enabled(ROLLOUT_SAMPLING):
        from slime_like_plugins.rollout_sampling import hooks

        hooks.install()
        record_loaded(ROLLOUT_SAMPLING)
