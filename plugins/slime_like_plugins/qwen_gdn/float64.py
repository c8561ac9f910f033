"""Gated DeltaNet layers in float64, registered as ``gdn`` in ``FLOAT64_LAYERS``."""

from __future__ import annotations

import copy
from contextlib import ExitStack
from dataclasses import fields
from typing import Any

import torch
from torch import Tensor, nn

from slime_like.train.megatron.model.float64_layers import cast, replace_attribute
from slime_like.train.megatron.model.layers import PackedRows
from slime_like_plugins.qwen_gdn.layer import GatedDeltaNetLayer
from slime_like_plugins.qwen_gdn.mixing import DeltaInputs
from slime_like_plugins.qwen_gdn.torch_chunk import TorchGDN

FLOAT64_BACKEND = TorchGDN()


def delta_net(model: nn.Module, stack: ExitStack) -> int:
    """Make every Gated DeltaNet layer compute its convolution, decay and delta rule in float64 with the torch backend.

    The error is about 1e-12 before the result is rounded to the layer's dtype. Projections, norm and gate are unchanged.
    Return the number of layers; closing ``stack`` restores them.
    """
    layers = [module for module in model.modules() if isinstance(module, GatedDeltaNetLayer)]
    for layer in layers:
        stack.enter_context(replace_attribute(layer, "mixing", Float64Mixing(layer.mixing)))
    return len(layers)


class Float64Mixing:
    """A layer's ``mixing`` with the torch backend and float64 inputs; only the result is rounded."""

    def __init__(self, mixing: Any) -> None:
        self._mixing = copy.copy(mixing)
        self._mixing.backend = FLOAT64_BACKEND
        self.enter, self.leave = mixing.enter, mixing.leave

    def __call__(self, inputs: DeltaInputs, packed: PackedRows) -> Tensor:
        """Return the output of the wrapped ``mixing`` in the dtype of ``inputs.qkv``."""
        inputs_f64 = DeltaInputs(*(cast(getattr(inputs, f.name), torch.float64) for f in fields(inputs)))
        return self._mixing(inputs_f64, packed).to(inputs.qkv.dtype)
