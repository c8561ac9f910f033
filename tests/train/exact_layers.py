"""Ranks of test_exact_layers: a kind of layer rounds to four bits, and scores are taken with each kind exact in turn."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import numpy as np
import torch

from slime_like.config.schema.resolved import Layout
from tests.train.jobs import Shared, make_actor
from tests.train.parity import TEMPERATURE, batch
from tests.train.ranks import World


def coarse(x: torch.Tensor) -> torch.Tensor:
    """Return float32 ``x`` with three bits of its fraction: in the scores an error far above float32's, by any kind of layer."""
    return (x.view(torch.int32) & -(1 << 20)).view(torch.float32)


def rounding(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return ``function`` with its result rounded, unless that is float64."""

    def rounded(*args: Any, **kwargs: Any) -> Any:
        out = function(*args, **kwargs)
        first = out[0] if isinstance(out, tuple) else out
        if first.dtype is not torch.float64:
            first = coarse(first)
        return (first, *out[1:]) if isinstance(out, tuple) else first

    return rounded


def plant(model: Any, fault: str, stack: ExitStack) -> None:
    """Make the layers of kind ``fault`` round until ``stack`` closes."""
    from megatron.core.ssm.mlp_layer import MLPLayer

    from slime_like.train.megatron.model.exact_layers import replaced
    from slime_like.train.megatron.model.layers import PackedAttention

    for layer in model.modules():
        module: Any = layer
        if fault == "attention" and isinstance(module, PackedAttention):
            stack.enter_context(replaced(module, "forward", rounding(module.forward)))
        if fault == "mlp" and isinstance(module, MLPLayer):
            stack.enter_context(replaced(module.mlp, "forward", rounding(module.mlp.forward)))
        if fault == "gdn" and hasattr(module, "mixing"):
            mixing: Any = module.mixing
            stack.enter_context(replaced(mixing, "backend", Rounding(mixing.backend)))


class Rounding:
    """A GDN backend that rounds."""

    def __init__(self, backend: Any) -> None:
        self.chunk_rule = rounding(backend.chunk_rule)
        self.causal_conv = backend.causal_conv


def attribute(world: World, shared: Shared, kind: str, layout: Layout, fault: str) -> dict[str, float] | None:
    """Mean |difference| from transformers by kind of exact layers, "" for none; on the reporter, None elsewhere."""
    actor = make_actor(world, shared.models[kind], layout, temperature=TEMPERATURE)
    assert set(actor.layer_kinds()) == {"attention", "gdn", "mlp"}
    rows, expected = batch()[0], shared.references[kind].logprobs[0]
    found: dict[str, float] = {}
    with ExitStack() as stack:
        plant(actor.model, fault, stack)
        for exact in (None, "attention", "gdn", "mlp", "all", None):
            scores = actor.score(rows, exact)
            if scores is not None:
                value = float(np.abs(scores - expected).mean())
                assert exact or not found or value == found[""], "something stayed exact"
                found[exact or ""] = value
    return found if actor.rank_info.is_reporter else None
