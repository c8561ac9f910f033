"""Matrix multiplications with weights that the C kernels or oneDNN pack once per weight push.

Otherwise oneDNN would pack them at every call. At 64 rows, packing takes a fifth of the time of a bfloat16 multiplication.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from slime_like_plugins.sglang_cpu.kernels import CKernels

MAX_BYTES = 1 << 28  # maximum size of weights that are kept twice (slime_like.planner.host counts them)
ROWS = 64  # number of rows for which oneDNN chooses a packing; it then works for any number


class Packing(Protocol):
    """Packing of weights by one library, and multiplications with packed weights."""

    name: str

    def packs(self, weight: Tensor) -> bool:
        """Return True if ``weight`` [M, K] can be packed."""
        ...

    def pack(self, weight: Tensor, old: Tensor | None = None) -> Tensor:
        """Return the packed form of a weight [M, K] for ``product``; may overwrite ``old``, an earlier result."""
        ...

    def product(self, x: Tensor, packed: Tensor, bias: Tensor | None, out: Tensor) -> Tensor:
        """Return ``x`` [N, K] times a packed weight, plus ``bias``: [N, M]. The result may be in ``out``."""
        ...


class OneDnn:
    """Multiplications in bfloat16 by oneDNN, on CPUs that support them."""

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
    """Return True if oneDNN supports bfloat16 on this CPU, and so can pack bfloat16 weights."""
    return torch.backends.mkldnn.is_available() and torch.ops.mkldnn._is_mkldnn_bf16_supported()


class Products:
    """Multiplications ``x W^T`` (plus bias) for the linear layers of one model.

    Call ``renew`` before each forward, so that the packed weights are up to date.
    """

    def __init__(self, model: Any, linears: Sequence[Any], head: Any | None = None, c: CKernels | None = None) -> None:
        """Choose the library that packs: ``c`` for ``linears`` and ``head``, else oneDNN for ``linears``, else none.

        A library is chosen only if it can pack all of these weights and they take at most ``MAX_BYTES``. In that case,
        the ``load_weights`` of ``model`` is wrapped to count its calls, because they may write weights.
        """
        choices: list[tuple[Packing, list[Any]]] = [(OneDnn(), list(linears))]
        if c is not None:
            choices.insert(0, (c, [*linears, *([] if head is None else [head])]))
        candidates = ((packing, weights) for packing, weights in choices if _fits(packing, weights))
        self._packing, self._linears = next(candidates, (None, []))
        self.bytes = _bytes(self._linears)  # size of the packed weights
        self._weights: list[Tensor] = []
        self._packed: dict[int, Tensor] = {}  # by id of the weight
        self._packed_state = -1
        self._loads = 0
        if self._packing is not None:
            self._count_loads(model)

    @property
    def packed_by(self) -> str:
        """Return the name of the library that packs the weights; "" if torch multiplies without packing."""
        return "" if self._packing is None else self._packing.name

    def renew(self) -> None:
        """Pack the weights at the first call, and again if they may have changed. Do nothing if no library packs.

        They may have changed after a call of ``load_weights`` or a write that torch counts, or if a weight is another tensor.
        """
        if self._packing is None:
            return
        weights: list[Tensor] = [linear.weight for linear in self._linears]
        # A push first overwrites every parameter, which torch's version counter records; SGLang's loaders bypass the counter.
        num_writes = self._loads + sum(weight._version for weight in weights)
        if num_writes != self._packed_state or any(
            new is not old for new, old in zip(weights, self._weights, strict=True)
        ):
            old, self._packed = self._packed, {}
            for weight in weights:
                self._packed[id(weight)] = self._packing.pack(weight.detach(), old.pop(id(weight), None))
            self._packed_state, self._weights = num_writes, weights

    def packed(self, linear: Any) -> Tensor:
        """Return the packed weight of a layer."""
        return self._packed[id(linear.weight)]

    def __call__(self, x: Tensor, linear: Any, out: Tensor) -> Tensor:
        """Apply ``linear`` to the rows ``x``; the result may be in ``out``."""
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
    return _bytes(linears) <= MAX_BYTES and all(packing.packs(linear.weight) for linear in linears)


def _bytes(linears: Sequence[Any]) -> int:
    return sum(linear.weight.numel() * linear.weight.element_size() for linear in linears)
