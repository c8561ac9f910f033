"""Weighted sums of SwiGLU experts for the rows of a decode step, by the C kernel in ``csrc/experts.h``.

Axes: N rows (tokens), K selected experts of a row, H hidden, F intermediate, E experts whose weights are passed.
"""

from __future__ import annotations

import ctypes
import logging
import os
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from slime_like_plugins.plugin_names import CPU_KERNELS_VARIABLE
from slime_like_plugins.sglang_cpu.build import BuildError, build
from slime_like_plugins.sglang_cpu.kernels import SUFFIX

CHUNK = 64  # pairs of an expert that the kernel computes together; the same constant is in csrc/experts.h
logger = logging.getLogger(__name__)


class ExpertSums:
    """Bindings to the kernel in the shared object at ``path``. Arguments that could make C read out of bounds are checked."""

    def __init__(self, path: Path) -> None:
        library = ctypes.CDLL(str(path))
        pointer, integer = ctypes.c_void_p, ctypes.c_int64
        self._functions = {dtype: library[f"expert_sums_{suffix}"] for dtype, suffix in SUFFIX.items()}
        for function in self._functions.values():
            function.argtypes, function.restype = [*[pointer] * 10, *[integer] * 5], None
        self._threads = library["threads"]
        self._threads.argtypes, self._threads.restype = [], integer

    def supports(self, w13: Tensor, w2: Tensor) -> bool:
        """Return True if the kernel can multiply by these matrices."""
        return w13.dtype in SUFFIX and all(
            matrix.dtype is w13.dtype and matrix.device.type == "cpu" and matrix.is_contiguous() for matrix in (w13, w2)
        )

    def __call__(self, x_NH: Tensor, ids_NK: Tensor, weights_NK: Tensor, w13: Tensor, w2: Tensor) -> Tensor:
        """Return the float32 sums [N, H] of ``weights * expert(x)`` over the experts ``ids``, in the order of the columns.

        An id outside of [0, E) stands for no expert. ``w13`` [E, 2F, H] has each expert's gate projection followed by its up
        projection, ``w2`` [E, H, F] its down projection.
        """
        (rows, selected), (experts, hidden, inner) = ids_NK.shape, w2.shape
        x_NH, ids_NK = x_NH.to(torch.float32).contiguous(), ids_NK.contiguous()
        weights_NK = weights_NK.contiguous()
        assert x_NH.shape == (rows, hidden) and weights_NK.shape == ids_NK.shape, f"rows {tuple(x_NH.shape)}"
        assert ids_NK.dtype is torch.int32 and weights_NK.dtype is torch.float32, f"ids are {ids_NK.dtype}"
        assert w13.shape == (experts, 2 * inner, hidden) and w13.dtype is w2.dtype, f"w13 {tuple(w13.shape)}"
        assert self.supports(w13, w2), f"{w13.dtype} on {w13.device}"
        pairs = rows * selected
        sums = torch.empty((rows, hidden), dtype=torch.float32)
        active = min(pairs, CHUNK) * inner * int(self._threads())
        workspace = torch.empty(pairs * hidden + active, dtype=torch.float32)
        indices = torch.empty(pairs + experts + 1, dtype=torch.int64)  # the pairs are int32 and use half of their space
        self._functions[w13.dtype](
            *(tensor.data_ptr() for tensor in (x_NH, ids_NK, weights_NK, w13, w2, sums, workspace)),
            *(workspace.data_ptr() + 4 * pairs * hidden, indices.data_ptr(), indices.data_ptr() + 8 * pairs),
            *(rows, selected, experts, hidden, inner),
        )
        return sums


@cache
def expert_sums_kernel() -> ExpertSums | None:
    """Return the compiled kernel; None if it cannot be compiled or loaded, or if ``rollout.cpu_kernels`` selects no C kernels."""
    if os.environ.get(CPU_KERNELS_VARIABLE) in ("off", "torch"):
        return None
    try:
        return ExpertSums(build().path)
    except (BuildError, OSError) as error:  # OSError: the object cannot be loaded, for example from a noexec folder
        logger.info("slime_like: experts of decode steps are computed by torch: %s", error)
        return None
