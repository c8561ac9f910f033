"""Gated DeltaNet layers in float64: the entry ``gdn`` of table ``EXACT_LAYERS``."""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import fields
from typing import Any

import torch
from torch import Tensor, nn

from slime_like.train.megatron.exact_layers import converted, replaced
from slime_like.train.megatron.layers import PackedRows
from slime_like_plugins.qwen_gdn.layer import GatedDeltaNetLayer
from slime_like_plugins.qwen_gdn.mixing import DeltaInputs
from slime_like_plugins.qwen_gdn.torch_chunk import TorchGDN

EXACT = TorchGDN()


def delta_net(model: nn.Module, stack: ExitStack) -> int:
    """Convolution, decay and delta rule of every layer by the torch backend in float64, which is exact to 1e-12.

    The projections around them, norm and gate are left alone.
    """
    layers = [module for module in model.modules() if isinstance(module, GatedDeltaNetLayer)]
    for layer in layers:
        stack.enter_context(replaced(layer, "mixing", exact_mixing(layer.mixing)))
    return len(layers)


def exact_mixing(mixing: Any) -> Callable[[DeltaInputs, PackedRows], Tensor]:
    """``mixing`` with other kernels, of wide inputs; the result is rounded once."""
    exact = copy.copy(mixing)
    exact.backend = EXACT

    def mixed(inputs: DeltaInputs, packed: PackedRows) -> Tensor:
        wide = DeltaInputs(*(converted(getattr(inputs, f.name), torch.float64) for f in fields(inputs)))
        return exact(wide, packed).to(inputs.qkv.dtype)

    return mixed
