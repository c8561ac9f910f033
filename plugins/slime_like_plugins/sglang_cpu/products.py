"""Products with a model's weights, which oneDNN packs anew at every call unless they were packed before.

For 64 rows, packing is a fifth of a bfloat16 product's time. The packed copies are made again after every push.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

MOST_BYTES = 1 << 28  # of weights that are kept twice; the plan counts an engine's weights once
ROWS = 64  # that the packing is chosen for; it serves any number


def can_pack() -> bool:
    """Whether oneDNN multiplies bfloat16 on this CPU."""
    return torch.backends.mkldnn.is_available() and torch.ops.mkldnn._is_mkldnn_bf16_supported()


class Products:
    """``x W^T`` (and bias) for linear layers of one model. Weights are read anew after whatever may have written them."""

    def __init__(self, model: Any, linears: Sequence[Any]) -> None:
        weights = [linear.weight for linear in linears]
        total = sum(weight.numel() * weight.element_size() for weight in weights)
        serves = all(weight.dtype is torch.bfloat16 for weight in weights) and can_pack()
        self.packs = serves and total <= MOST_BYTES
        self._weights = weights if self.packs else []
        self._packed: dict[int, Tensor] = {}  # by the weight's identity
        self._seen = -1
        self._loads = 0
        if self.packs:
            self._count_loads(model)

    def renew(self) -> None:
        """Before a forward: pack what was written since the last one."""
        # A push begins by overwriting every parameter, which torch counts; SGLang's loaders write behind its back.
        written = self._loads + sum(weight._version for weight in self._weights)
        if written != self._seen:
            reorder = torch.ops.mkldnn._reorder_linear_weight
            self._packed = {id(weight): reorder(weight.detach(), ROWS) for weight in self._weights}
            self._seen = written

    def __call__(self, x: Tensor, linear: Any, out: Tensor) -> Tensor:
        """``linear`` applied to rows; where it is not packed, in ``out``."""
        weight, bias = linear.weight, getattr(linear, "bias", None)
        packed = self._packed.get(id(weight))
        if packed is not None:
            return torch.ops.mkldnn._linear_pointwise(x, packed, bias, "none", [], "")
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
