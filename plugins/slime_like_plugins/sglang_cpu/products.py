"""Products with a model's weights, packed once per push: by the C kernels, or by oneDNN, which else packs at every call.

Packing is a fifth of a bfloat16 product's time at 64 rows. The packed copies are made again after every push.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from slime_like_plugins.sglang_cpu.kernels import CKernels

MOST_BYTES = 1 << 28  # of weights that are kept twice; the plan counts an engine's weights once
ROWS = 64  # that oneDNN's packing is chosen for; it serves any number


class Packing(Protocol):
    """One library's packed weights, and products with them."""

    name: str

    def packs(self, weight: Tensor) -> bool:
        """Whether a weight [M, K] can be packed."""
        ...

    def pack(self, weight: Tensor, old: Tensor | None = None) -> Tensor:
        """What ``product`` takes for a weight [M, K]; ``old`` is what it gave before, and may be written over."""
        ...

    def product(self, x: Tensor, packed: Tensor, bias: Tensor | None, out: Tensor) -> Tensor:
        """[N, M] of ``x`` [N, K]; in ``out``, or not."""
        ...


class OneDnn:
    """Bfloat16, where the CPU multiplies it."""

    name = "oneDNN"

    def packs(self, weight: Tensor) -> bool:
        return weight.dtype is torch.bfloat16 and can_pack()

    def pack(self, weight: Tensor, old: Tensor | None = None) -> Tensor:
        del old
        return torch.ops.mkldnn._reorder_linear_weight(weight, ROWS)

    def product(self, x: Tensor, packed: Tensor, bias: Tensor | None, out: Tensor) -> Tensor:
        del out
        return torch.ops.mkldnn._linear_pointwise(x, packed, bias, "none", [], "")


def can_pack() -> bool:
    """Whether oneDNN multiplies bfloat16 on this CPU."""
    return torch.backends.mkldnn.is_available() and torch.ops.mkldnn._is_mkldnn_bf16_supported()


class Products:
    """``x W^T`` (and bias) for linear layers of one model. Weights are read anew after whatever may have written them."""

    def __init__(self, model: Any, linears: Sequence[Any], head: Any | None = None, c: CKernels | None = None) -> None:
        """C packs ``head`` as well, for a decode step; where it does not serve, oneDNN packs the layers alone."""
        choices: list[tuple[Packing, list[Any]]] = [(OneDnn(), list(linears))]
        if c is not None:
            choices.insert(0, (c, [*linears, *([] if head is None else [head])]))
        found = next(((packing, packed) for packing, packed in choices if _fits(packing, packed)), (None, []))
        self._packing, self._linears = found
        self.bytes = _bytes(self._linears)  # of the weights that are packed
        self._weights: list[Tensor] = []
        self._packed: dict[int, Tensor] = {}  # by the weight's identity
        self._seen = -1
        self._loads = 0
        if self._packing is not None:
            self._count_loads(model)

    @property
    def packed_by(self) -> str:
        """The library that packed the weights; "" where each product is torch's on its own."""
        return "" if self._packing is None else self._packing.name

    def renew(self) -> None:
        """Before a forward: pack what was written, or put in a weight's place, since the last one."""
        if self._packing is None:
            return
        weights: list[Tensor] = [linear.weight for linear in self._linears]
        # A push begins by overwriting every parameter, which torch counts; SGLang's loaders write behind its back.
        written = self._loads + sum(weight._version for weight in weights)
        if written != self._seen or any(new is not old for new, old in zip(weights, self._weights, strict=True)):
            old, self._packed = self._packed, {}
            for weight in weights:
                self._packed[id(weight)] = self._packing.pack(weight.detach(), old.pop(id(weight), None))
            self._seen, self._weights = written, weights

    def packed(self, linear: Any) -> Tensor:
        """What ``renew`` made of a layer's weight."""
        return self._packed[id(linear.weight)]

    def __call__(self, x: Tensor, linear: Any, out: Tensor) -> Tensor:
        """``linear`` applied to rows; maybe in ``out``."""
        weight, bias = linear.weight, getattr(linear, "bias", None)
        packed = self._packed.get(id(weight))
        if self._packing is not None and packed is not None:
            return self._packing.product(x, packed, bias, out)
        if bias is None:
            return torch.mm(x, weight.t(), out=out)
        return torch.addmm(bias, x, weight.t(), out=out)

    def _count_loads(self, model: Any) -> None:
        original = model.load_weights

        @functools.wraps(original)
        def load_weights(*args: Any, **kwargs: Any) -> Any:
            self._loads += 1
            return original(*args, **kwargs)

        model.load_weights = load_weights


def _fits(packing: Packing, linears: Sequence[Any]) -> bool:
    return _bytes(linears) <= MOST_BYTES and all(packing.packs(linear.weight) for linear in linears)


def _bytes(linears: Sequence[Any]) -> int:
    return sum(linear.weight.numel() * linear.weight.element_size() for linear in linears)
