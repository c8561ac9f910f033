"""Rank functions of test_float64_layers: a kind of layer rounds coarsely, and each kind in turn runs in float64."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import numpy as np
import torch

from slime_like.config.schema.resolved import Layout
from tests.train.jobs import Shared, make_actor
from tests.train.parity import TEMPERATURE, batch
from tests.train.ranks import RankWorld


def coarse(x: torch.Tensor) -> torch.Tensor:
    """Return float32 ``x`` with only three bits of its fraction, a much larger error than the rounding of float32."""
    return (x.view(torch.int32) & -(1 << 20)).view(torch.float32)


def rounding(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return ``function`` with a coarse result, unless the result is float64."""

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

    from slime_like.train.megatron.model.float64_layers import replace_attribute
    from slime_like.train.megatron.model.layers import PackedAttention

    for layer in model.modules():
        module: Any = layer
        if fault == "attention" and isinstance(module, PackedAttention):
            stack.enter_context(replace_attribute(module, "forward", rounding(module.forward)))
        if fault == "mlp" and isinstance(module, MLPLayer):
            stack.enter_context(replace_attribute(module.mlp, "forward", rounding(module.mlp.forward)))
        if fault == "gdn" and hasattr(module, "mixing"):
            mixing: Any = module.mixing
            stack.enter_context(replace_attribute(mixing, "backend", Rounding(mixing.backend)))


class Rounding:
    """GDN backend whose delta rule rounds."""

    def __init__(self, backend: Any) -> None:
        self.chunk_rule = rounding(backend.chunk_rule)
        self.causal_conv = backend.causal_conv


def attribute(world: RankWorld, shared: Shared, kind: str, layout: Layout, fault: str) -> dict[str, float] | None:
    """Return the mean |difference| from transformers by kind of float64 layers ("": none); None off the reporter."""
    actor = make_actor(world, shared.models[kind], layout, temperature=TEMPERATURE)
    assert set(actor.layer_kinds()) == {"attention", "gdn", "mlp"}
    micro_batch, expected = batch()[0], shared.references[kind].logprobs[0]
    mean_errors: dict[str, float] = {}
    with ExitStack() as stack:
        plant(actor.model, fault, stack)
        for kind_in_float64 in (None, "attention", "gdn", "mlp", "all", None):
            scores = actor.score(micro_batch, kind_in_float64)
            if scores is not None:
                value = float(np.abs(scores - expected).mean())
                assert kind_in_float64 or not mean_errors or value == mean_errors[""], "a layer stayed in float64"
                mean_errors[kind_in_float64 or ""] = value
    return mean_errors if actor.rank_info.is_reporter else None
