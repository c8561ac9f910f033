"""Reproducible sampling for RL: a seed per sample, and log-probabilities of the sampling distribution.

SGLang honours ``sampling_seed`` only in its deterministic mode, which also changes attention and communication, and
always scores *input* tokens at temperature 1. With ``rollout_sampling`` in ``SLIME_LIKE_SGLANG``,
seeds are honoured and input tokens are scored at the request's temperature, on CPU and GPU.

Seeds work with all sampling options: temperature, top-k, nucleus, min-p, penalties, biases, grammars, custom logit
processors, sampling masks. They do not work with speculative decoding, which verifies drafts in separate functions:
the engine logs a warning, and ``run.deterministic`` refuses it.

If a request asks for it, the reply has base64 columns instead of lists of tokens and log-probabilities (``columns``).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from slime_like_plugins.sglang_hooks import enabled, record_loaded

if TYPE_CHECKING:
    from torch import Tensor

    type Kernel = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], tuple[Tensor, Tensor] | None]

NAME = "rollout_sampling"
_kernel: list[Kernel] = []


def load() -> None:
    """Entry point ``sglang.srt.plugins``."""
    if enabled(NAME):
        from slime_like_plugins.rollout_sampling import hooks

        hooks.install()
        record_loaded(NAME)


def use_kernel(kernel: Kernel | None) -> None:
    """Sample plain batches with ``kernel(logits, temperatures, top_k, seeds, positions)``, or with torch if it is ``None``.

    The kernel must sample the same tokens as ``draw``, or return ``None`` to leave the batch to torch.
    """
    _kernel[:] = [] if kernel is None else [kernel]


def kernel() -> Kernel | None:
    """Return the current sampling kernel, or ``None``."""
    return _kernel[0] if _kernel else None
