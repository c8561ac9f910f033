"""Matrix multiplications of all experts of a rank by the C kernels (``csrc/experts.h``), as an autograd function.

The kernels are used only on CPUs with AVX-512 (with its BF16 instructions for bfloat16), because elsewhere torch is faster.
Arguments that could make C read out of bounds are checked here.

Axes: R rows (tokens, ordered by expert), E experts, I inputs, O outputs.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from functools import cache
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from slime_like_plugins.megatron_cpu.kernels import SOURCE, SUFFIX
from slime_like_plugins.sglang_cpu.build import build

COLUMNS, GRAD_OUTPUTS, GRAD_ROWS = 32, 192, 768  # the same constants are in csrc/units.h
_POINTER, _INT64, _INT = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int
_SIGNATURES = {
    "expert_products": [*[_POINTER] * 5, *[_INT64] * 4, _INT],
    "expert_gradients": [*[_POINTER] * 5, *[_INT64] * 3, _INT],
}


class ExpertKernels:
    """Bindings to the experts' matrix multiplications in the shared object at ``path``."""

    def __init__(self, path: Path) -> None:
        library = ctypes.CDLL(str(path))
        self._functions: dict[tuple[str, torch.dtype], ctypes._NamedFuncPointer] = {}  # pyright: ignore[reportPrivateUsage]  ctypes has no public name for the type
        self._dtypes = {dtype for dtype, suffix in SUFFIX.items() if library[f"multiplies_{suffix}"]()}
        for dtype, suffix in SUFFIX.items():
            for name, arguments in _SIGNATURES.items():
                function = library[f"{name}_{suffix}"]
                function.argtypes, function.restype = arguments, None
                self._functions[name, dtype] = function

    def multiplies(self, rows_RI: Tensor, weight_OI: Tensor) -> bool:
        """Return True if these kernels support shape and dtype of the arguments, and are faster than torch on this CPU."""
        is_even = rows_RI.dtype is torch.float32 or not any(n % 2 for n in weight_OI.shape)  # bf16 is summed in pairs
        return rows_RI.dtype in self._dtypes and weight_OI.dtype is rows_RI.dtype and is_even

    def products(self, rows: Tensor, counts: Sequence[int], weights: Sequence[Tensor], *, transpose: bool) -> Tensor:
        """Return each expert's rows times its weight [O, I], or with ``transpose`` times the weight's transpose."""
        shape = tuple(weights[0].shape)
        inputs, outputs = reversed(shape) if transpose else shape
        _check(rows.dtype, (rows, (sum(counts), inputs)), *((weight, shape) for weight in weights))
        assert len(weights) == len(counts), f"{len(weights)} weights of {len(counts)} experts"
        units = inputs * rows.element_size() // 4
        out = rows.new_empty((len(rows), outputs))
        addresses = torch.tensor([weight.data_ptr() for weight in weights])
        scratch = rows.new_empty((torch.get_num_threads(), units * COLUMNS), dtype=torch.float32)
        tensors = (rows, addresses, _bounds(counts), out, scratch)
        self._call("expert_products", rows.dtype, tensors, len(counts), units, outputs, int(transpose))
        return out

    def gradients(self, grad_RO: Tensor, rows_RI: Tensor, counts: Sequence[int]) -> Tensor:
        """Return the gradients [E, O, I] of the weights, which are zero for an expert without rows."""
        r, o, i = sum(counts), grad_RO.shape[1], rows_RI.shape[1]
        _check(rows_RI.dtype, (grad_RO, (r, o)), (rows_RI, (r, i)))
        out = rows_RI.new_empty((len(counts), o, i))
        depth = GRAD_ROWS * rows_RI.element_size() // 4
        size = depth * (GRAD_OUTPUTS + COLUMNS) + GRAD_OUTPUTS * (-(-i // COLUMNS) * COLUMNS)
        scratch = rows_RI.new_empty((torch.get_num_threads(), size), dtype=torch.float32)
        tensors = (grad_RO, rows_RI, _bounds(counts), out, scratch)
        self._call("expert_gradients", rows_RI.dtype, tensors, len(counts), o, i)
        return out

    def _call(self, name: str, dtype: torch.dtype, tensors: tuple[Tensor, ...], *numbers: int) -> None:
        self._functions[name, dtype](*(tensor.data_ptr() for tensor in tensors), *numbers, torch.get_num_threads())


@cache
def expert_kernels() -> ExpertKernels:
    """Return the kernels of this process, compiled unless cached.

    Raises ``BuildError`` if they cannot be compiled, ``OSError`` if they cannot be loaded.
    """
    return ExpertKernels(build(SOURCE).path)


class ExpertLinearFunction(torch.autograd.Function):
    """Linear layer of each expert.

    The inputs are the rows [R, I], the number of rows per expert, the kernels, and a weight [O, I] per expert; the
    result is [R, O].
    """

    @staticmethod
    def forward(ctx: Any, rows_RI: Tensor, counts: tuple[int, ...], kernels: ExpertKernels, *weights: Tensor) -> Tensor:
        ctx.save_for_backward(rows_RI, *weights)
        ctx.counts, ctx.kernels = counts, kernels
        return kernels.products(rows_RI, counts, weights, transpose=True)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        rows_RI, *weights = ctx.saved_tensors
        grad_RO = grads[0].contiguous()
        grad_rows = ctx.kernels.products(grad_RO, ctx.counts, weights, transpose=False)
        return grad_rows, None, None, *ctx.kernels.gradients(grad_RO, rows_RI, ctx.counts).unbind()


def _bounds(counts: Sequence[int]) -> Tensor:
    assert min(counts) >= 0, f"the numbers of rows are {counts}"
    return torch.tensor([0, *accumulate(counts)])


def _check(dtype: torch.dtype, *pairs: tuple[Tensor, tuple[int, ...]]) -> None:
    for tensor, shape in pairs:
        assert tensor.dtype is dtype, f"the tensor is {tensor.dtype}, expected {dtype}"
        assert tensor.shape == shape, f"the shape is {tuple(tensor.shape)}, expected {shape}"
        assert tensor.is_contiguous() and tensor.device.type == "cpu", f"{tensor.device}, strides {tensor.stride()}"
