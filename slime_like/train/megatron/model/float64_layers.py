"""Layers of one kind computed in float64 while scoring, to attribute a difference from the engine to that kind.

A function registered in ``FLOAT64_LAYERS`` makes the layers of its kind compute in float64 until an exit stack closes.
Weights and inputs of a layer are unchanged, and its result is rounded once to their precision.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from megatron.core.ssm.mlp_layer import MLPLayer
from torch import Tensor, nn

from slime_like.config.schema.names import FLOAT64_LAYERS
from slime_like.registry import resolve
from slime_like.train.megatron.model.layers import PackedAttention

ALL = "all"
MakeFloat64 = Callable[[nn.Module, ExitStack], int]
"""(model, stack) -> number of layers that compute in float64 until the stack closes."""


def kinds(model: nn.Module) -> tuple[str, ...]:
    """Return the kinds of layers in ``model`` that can be computed in float64, in the order of ``FLOAT64_LAYERS``."""
    names: list[str] = []
    for name in FLOAT64_LAYERS:
        with ExitStack() as stack:
            if _maker(name)(model, stack):
                names.append(name)
    return tuple(names)


@contextmanager
def float64_layers(model: nn.Module, kind: str | None) -> Generator[None]:
    """Make layers of ``kind`` compute in float64 until exit: layers of all kinds if it is ``ALL``, none if it is None."""
    with ExitStack() as stack:
        for name in FLOAT64_LAYERS:
            if kind in (name, ALL):
                _maker(name)(model, stack)
        yield


def _maker(name: str) -> MakeFloat64:
    return resolve("layer kind", name, FLOAT64_LAYERS)


def attention(model: nn.Module, stack: ExitStack) -> int:
    """Make core attention compute in float64 until ``stack`` closes; return the number of layers.

    Scores, softmax and the weighted sum of values are in float64; the projections are not. TransformerEngine's attention is not
    changed and not counted.
    """
    layers = [module for module in model.modules() if isinstance(module, PackedAttention)]
    for layer in layers:
        stack.enter_context(replace_attribute(layer, "forward", in_float64(layer.forward, layer.config.params_dtype)))
    return len(layers)


def mlp(model: nn.Module, stack: ExitStack) -> int:
    """Make each layer's MLP, or router and experts, compute in float64 until ``stack`` closes; return the number of layers.

    They use float64 copies of their weights. A router still computes its scores in float32.
    """
    mlps: list[Any] = [module.mlp for module in model.modules() if isinstance(module, MLPLayer)]
    for part in mlps:
        stack.enter_context(replace_attribute(part, "forward", with_weights_in_float64(part)))
    return len(mlps)


@contextmanager
def replace_attribute(module: Any, name: str, value: Any) -> Generator[None]:
    """Set attribute ``name`` of an object, and restore the previous state on exit."""
    in_instance = name in vars(module)
    stock = getattr(module, name)
    setattr(module, name, value)
    try:
        yield
    finally:
        if in_instance:
            setattr(module, name, stock)
        else:
            delattr(module, name)


def in_float64(function: Callable[..., Any], dtype: torch.dtype | None = None) -> Callable[..., Any]:
    """Wrap ``function`` to run on float64 copies of its arguments.

    The result has ``dtype``, by default that of the first positional argument that is a floating-point tensor.
    """

    def wide(*args: Any, **kwargs: Any) -> Any:
        result = dtype or next(arg.dtype for arg in args if isinstance(arg, Tensor) and arg.is_floating_point())
        widened_arguments = {name: cast(arg, torch.float64) for name, arg in kwargs.items()}
        return cast(function(*(cast(arg, torch.float64) for arg in args), **widened_arguments), result)

    return wide


def with_weights_in_float64(module: nn.Module) -> Callable[..., Any]:
    """Return a replacement of ``module.forward`` that runs on float64 copies of its arguments and the module's parameters.

    The result is cast as by ``in_float64``.
    """
    original = module.forward

    def forward(*args: Any, **kwargs: Any) -> Any:
        wide = {name: cast(parameter, torch.float64) for name, parameter in module.named_parameters()}
        with replace_attribute(module, "forward", in_float64(original)):
            return torch.func.functional_call(module, wide, args, kwargs)

    return forward


def cast(value: Any, dtype: torch.dtype) -> Any:
    """Cast a floating-point tensor, or the floating-point tensors of a tuple, to ``dtype``; return other values unchanged."""
    if isinstance(value, tuple):
        return tuple(cast(part, dtype) for part in value)
    return value.to(dtype) if isinstance(value, Tensor) and value.is_floating_point() else value
