"""Batch-invariant engine: a token's logits are bitwise equal in prefill, in decode and after a prefix-cache hit, in any batch.

The names ``exact`` and ``cpu`` together in ``SLIME_LIKE_SGLANG`` enable it (``run.deterministic=true``). The arithmetic is
that of ``slime_like.util.batch_invariant``, which the trainer also uses. While ``exact`` is enabled, faster code of this package
must not replace or bypass a function that is hooked here.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from slime_like.util import batch_invariant
from slime_like_plugins.plugin_names import EXACT
from slime_like_plugins.sglang_hooks import Hook, stop_on
from slime_like_plugins.sglang_hooks import install as install_hooks

EXACT_ATTENTION = "slime_like_exact"


def apply_linear(original: Callable[..., Tensor], method: Any, layer: Any, x: Tensor, bias: Any = None) -> Tensor:
    """Hook around ``UnquantizedLinearMethod.apply``: pad ``x`` to at least ``batch_invariant.ROWS`` rows.

    With so many rows, each row of the result is independent of the others.
    """
    return original(method, layer, batch_invariant.padded_rows(x), bias)[: x.shape[0]]


def compute_lm_head(
    original: Callable[..., Tensor], processor: Any, hidden: Tensor, head: Any, bias: Any = None, *, out: Any = None
) -> Tensor:
    """Hook around ``LogitsProcessor._compute_lm_head``: pad ``hidden`` as ``apply_linear`` pads ``x``."""
    if hidden.shape[0] >= batch_invariant.ROWS:
        return original(processor, hidden, head, bias, out=out)
    return original(processor, batch_invariant.padded_rows(hidden), head, bias)[: hidden.shape[0]]


HOOKS = (
    Hook("sglang.srt.layers.quantization.unquant.UnquantizedLinearMethod.apply", "around", apply_linear),
    Hook("sglang.srt.layers.logits_processor.LogitsProcessor._compute_lm_head", "around", compute_lm_head),
)


def install() -> None:
    """Register the attention backend's name, and apply the hooks in this process.

    Raises ``SystemExit`` if a hook is not in place.
    """
    from sglang.srt.arg_groups import choices

    choices.add_attention_backend_choices([EXACT_ATTENTION])
    install_hooks(EXACT, HOOKS)


def check(model: Any) -> None:
    """Raise ``SystemExit`` if, on this machine, a row of a product with a weight of ``model`` depends on the other rows."""
    shapes = [tuple(w.shape) for name, w in model.named_parameters() if w.ndim == 2 and name.endswith("weight")]
    if problem := batch_invariant.check_machine(shapes):
        stop_on(EXACT, [f"{problem}; run.deterministic=true is not possible on this machine"])
