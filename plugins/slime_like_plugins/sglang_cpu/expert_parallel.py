"""Expert parallelism on a CPU (``ep_size``): a rank computes the rows of its own experts.

SGLang replaces the ids of other ranks' experts by -1, which its CPU path uses as an index. Remove when that path skips them.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from sglang.srt.runtime_context import get_parallel
from torch import Tensor

from slime_like_plugins.plugin_names import CPU
from slime_like_plugins.sglang_hooks import wrap_target


def install() -> None:
    """Call ``replace`` if the experts are divided over ranks."""
    if get_parallel().moe_ep_size > 1:
        replace()


def replace() -> None:
    """Wrap the experts' forward to skip other ranks' experts. Raises ``SystemExit`` if SGLang has no such function."""
    wrap_target(CPU, "sglang.srt.layers.moe.fused_moe_native.moe_forward_native", local_choices)


def local_choices(forward: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Wrap the experts' ``forward`` to skip ids of -1: each remaining (token, expert) pair is passed as a token of its own."""

    @functools.wraps(forward)
    def wrapped(layer: Any, x: Tensor, topk_output: Any, config: Any) -> Tensor:
        tokens, choices = (topk_output.topk_ids >= 0).nonzero(as_tuple=True)
        out = torch.zeros_like(x)
        if len(tokens) == 0:
            return out
        chosen_output = topk_output._replace(
            topk_ids=topk_output.topk_ids[tokens, choices, None],
            topk_weights=topk_output.topk_weights[tokens, choices, None],
        )
        return out.index_add_(0, tokens, forward(layer, x[tokens], chosen_output, config))

    return wrapped
