"""Layers of one kind computed in float64, so that a comparison with the engine can say which kind it differs by.

An entry of table ``EXACT_LAYERS`` makes every layer of its kind in a model exact, until the stack it is given closes.
Weights and inputs are those of the layer, its result is rounded to their precision once. For scoring only.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from megatron.core.ssm.mlp_layer import MLPLayer
from torch import Tensor, nn

from slime_like.config.schema.names import EXACT_LAYERS
from slime_like.registry import resolve
from slime_like.train.megatron.model.layers import PackedAttention

ALL = "all"
MakeExact = Callable[[nn.Module, ExitStack], int]
"""(model, stack) -> number of layers made exact until the stack closes."""


def kinds(model: nn.Module) -> tuple[str, ...]:
    """Kinds of layers that ``model`` has, in the order of the table."""
    found: list[str] = []
    for name in EXACT_LAYERS:
        with ExitStack() as stack:
            if _maker(name)(model, stack):
                found.append(name)
    return tuple(found)


@contextmanager
def exact_layers(model: nn.Module, kind: str | None) -> Generator[None]:
    """Layers of ``kind`` (``ALL``: of every kind; ``None``: of none) in float64."""
    with ExitStack() as stack:
        for name in EXACT_LAYERS:
            if kind in (name, ALL):
                _maker(name)(model, stack)
        yield


def _maker(name: str) -> MakeExact:
    return resolve("layer kind", name, EXACT_LAYERS)


def attention(model: nn.Module, stack: ExitStack) -> int:
    """Core attention: scores, softmax and the sum of values. Its projections are left alone."""
    layers = [module for module in model.modules() if isinstance(module, PackedAttention)]
    for layer in layers:
        stack.enter_context(replaced(layer, "forward", in_float64(layer.forward, layer.config.params_dtype)))
    return len(layers)


def mlp(model: nn.Module, stack: ExitStack) -> int:
    """The MLP behind each mixer, or router and experts, with their weights."""
    found: list[Any] = [module.mlp for module in model.modules() if isinstance(module, MLPLayer)]
    for part in found:
        stack.enter_context(replaced(part, "forward", with_weights_in_float64(part)))
    return len(found)


@contextmanager
def replaced(module: Any, name: str, value: Any) -> Generator[None]:
    """``value`` as attribute ``name`` of one object, which shows its class's, or its own of before, again at the end."""
    own = name in vars(module)
    before = getattr(module, name)
    setattr(module, name, value)
    try:
        yield
    finally:
        if own:
            setattr(module, name, before)
        else:
            delattr(module, name)


def in_float64(function: Callable[..., Any], dtype: torch.dtype | None = None) -> Callable[..., Any]:
    """``function`` of wide copies of its floating arguments; results in ``dtype``, or as wide as the first of them was."""

    def wide(*args: Any, **kwargs: Any) -> Any:
        result = dtype or next(arg.dtype for arg in args if isinstance(arg, Tensor) and arg.is_floating_point())
        widened = {name: converted(arg, torch.float64) for name, arg in kwargs.items()}
        return converted(function(*(converted(arg, torch.float64) for arg in args), **widened), result)

    return wide


def with_weights_in_float64(module: nn.Module) -> Callable[..., Any]:
    """The forward of ``module`` with wide copies of its parameters, too."""
    original = module.forward

    def forward(*args: Any, **kwargs: Any) -> Any:
        wide = {name: converted(parameter, torch.float64) for name, parameter in module.named_parameters()}
        with replaced(module, "forward", in_float64(original)):
            return torch.func.functional_call(module, wide, args, kwargs)

    return forward


def converted(value: Any, dtype: torch.dtype) -> Any:
    """A floating tensor, or a tuple of some, in ``dtype``; anything else as it is."""
    if isinstance(value, tuple):
        return tuple(converted(part, dtype) for part in value)
    return value.to(dtype) if isinstance(value, Tensor) and value.is_floating_point() else value
