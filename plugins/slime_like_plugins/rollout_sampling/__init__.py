"""Sampling an RL run can rely on: a seed per sample, and log-probabilities of the distribution sampled from.

SGLang honours ``sampling_seed`` only in its deterministic mode, which changes attention and communication as well, and
returns log-probabilities of *given* tokens at temperature 1 whatever the request asks. With ``rollout_sampling`` in
``SLIME_LIKE_SGLANG``, seeds always count and given tokens are scored at the request's temperature, on CPU and GPU.
"""

from __future__ import annotations

from slime_like_plugins.sglang_hooks import enabled

NAME = "rollout_sampling"


def load() -> None:
    """Entry point ``sglang.srt.plugins``."""
    if enabled(NAME):
        from slime_like_plugins.rollout_sampling import hooks

        hooks.install()
