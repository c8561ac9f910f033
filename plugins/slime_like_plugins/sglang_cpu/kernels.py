"""Leaf kernels of the fused forward, implemented in C (``csrc``) and in torch behind one interface.

C also has sampling, attention over the page table, matrix multiplications, and a decode step that combines all but sampling.

Both versions compute in float32 and round when storing. The caller guarantees shapes and indices. Most dtypes are asserted here,
because C would read beyond a tensor with smaller elements.

Axes: B rows (in a decode step, one per request), T hidden, F features of a gate and its value, H query heads, K KV heads, D head
dimension, S slots of the KV pool, V vocabulary. In matrix multiplications: N rows, K inputs, M outputs.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

# BLOCK, COLUMNS and DEPTH are also in csrc/kernels.c, GROUP is a number in csrc/typed.h.
LANES = 16  # widest vector of a C build
BLOCK = 256  # entries of the vocabulary per block, in sampling
GROUP = 4  # query heads that C processes together
COLUMNS = 2 * LANES  # per panel of packed weights
DEPTH = {torch.float32: 1, torch.bfloat16: 2}  # inputs that a matrix multiplication processes together
LAYER_FIELDS, STEP_FIELDS = 14, 26  # fields of the structures in csrc/step.h, 8 bytes each
SUFFIX = {torch.float32: "f32", torch.bfloat16: "bf16"}


class Kernels(Protocol):
    """Kernels of a forward, except matrix multiplications and attention."""

    def add_rms_norm(self, x_BT: Tensor, delta_BT: Tensor | None, weight_T: Tensor, out_BT: Tensor, eps: float) -> None:
        """Add ``delta``, if given, to ``x`` in place; write the sum's RMSNorm times ``weight`` to ``out``.

        The norm is that of the float32 sum, before it is rounded to the dtype of ``x``.
        """
        ...

    def silu_mul(self, gate_up_BF: Tensor, out_BF: Tensor) -> None:
        """Compute ``out = silu(gate) * up`` from a [B, 2 F] tensor that holds gate, then up."""
        ...

    def rope_and_store(
        self,
        qkv: Tensor,
        norms: tuple[Tensor, Tensor] | None,
        angles: tuple[Tensor, Tensor],
        slots_B: Tensor,
        pools: tuple[Tensor, Tensor],
        out_BHD: Tensor,
        eps: float,
    ) -> None:
        """Normalise (if ``norms`` is given) and rotate the queries and keys of ``qkv`` [B, (H + 2 K) D].

        The queries are written to ``out_BHD``, the keys and values to the rows ``slots_B`` of ``pools``: keys and values
        [S, K, D]. ``norms``: weights [D] of queries and keys. ``angles``: cosines then sines [positions, D] in float32, and
        the position [B] of each row.
        """
        ...


class TorchKernels:
    """Kernels in torch, which are always available."""

    def add_rms_norm(self, x_BT: Tensor, delta_BT: Tensor | None, weight_T: Tensor, out_BT: Tensor, eps: float) -> None:
        row_BT = x_BT.float()
        if delta_BT is not None:
            row_BT = row_BT + delta_BT
            x_BT.copy_(row_BT)
        out_BT.copy_(F.rms_norm(row_BT, (x_BT.shape[1],), weight_T.float(), eps))

    def silu_mul(self, gate_up_BF: Tensor, out_BF: Tensor) -> None:
        gate, up = gate_up_BF.float().chunk(2, -1)
        out_BF.copy_(F.silu(gate).mul_(up))

    def rope_and_store(
        self,
        qkv: Tensor,
        norms: tuple[Tensor, Tensor] | None,
        angles: tuple[Tensor, Tensor],
        slots_B: Tensor,
        pools: tuple[Tensor, Tensor],
        out_BHD: Tensor,
        eps: float,
    ) -> None:
        rows, heads, dim = out_BHD.shape
        keys, values = pools
        parts = qkv.view(rows, -1, dim)
        rotated = parts[:, : heads + keys.shape[1]].float()
        if norms is not None:
            weights = torch.cat((norms[0].expand(heads, dim), norms[1].expand(keys.shape[1], dim)))
            rotated = F.rms_norm(rotated, (dim,), None, eps).mul_(weights)
        cos_sin = angles[0].index_select(0, angles[1])[:, None]
        cos, sin = cos_sin.chunk(2, -1)
        first, second = rotated.chunk(2, -1)
        rotated = torch.cat((first * cos - second * sin, second * cos + first * sin), -1).to(qkv.dtype)
        out_BHD.copy_(rotated[:, :heads])
        keys.index_copy_(0, slots_B, rotated[:, heads:])
        values.index_copy_(0, slots_B, parts[:, heads + keys.shape[1] :])


class CKernels:
    """Kernels in C, called through ctypes."""

    name = "C"

    def __init__(self, path: Path) -> None:
        library = ctypes.CDLL(str(path))
        pointer, integer, real = ctypes.c_void_p, ctypes.c_int64, ctypes.c_float
        signatures = {
            "add_rms_norm": [*[pointer] * 4, integer, integer, real],
            "silu_mul": [pointer, pointer, integer, integer],
            "rope_and_store": [*[pointer] * 9, *[integer] * 4, real],
            "attention": [*[pointer] * 4, integer, *[pointer] * 4, *[integer] * 5, real],
            "partial_attention": [*[pointer] * 4, integer, *[pointer] * 5, *[integer] * 5, real],
        }
        has_products = library["has_products"]
        has_products.restype = integer
        self.has_products = bool(has_products())
        if self.has_products:
            signatures["pack"] = [pointer, pointer, integer, integer]
            signatures["product"] = [*[pointer] * 4, *[integer] * 3]
            signatures["decode"] = [pointer, integer, pointer, integer, real, real]
        self._functions: dict[tuple[str, torch.dtype], ctypes._NamedFuncPointer] = {}  # pyright: ignore[reportPrivateUsage]  ctypes has no public name for the type
        for dtype, suffix in SUFFIX.items():
            for name, arguments in signatures.items():
                function = library[f"{name}_{suffix}"]
                function.argtypes, function.restype = arguments, None
                self._functions[name, dtype] = function
        self._sample = library["sample_f32"]
        self._sample.argtypes, self._sample.restype = [pointer, *[integer] * 3, *[pointer] * 8], integer
        self._uniforms = library["uniforms"]
        self._uniforms.argtypes, self._uniforms.restype = [pointer, pointer, pointer, integer], None
        self._threads = library["threads"]
        self._threads.argtypes, self._threads.restype = [], integer
        self._workspace = torch.empty(0, dtype=torch.float32)

    @property
    def threads(self) -> int:
        """Maximum number of threads over which C divides its work."""
        return int(self._threads())

    def add_rms_norm(self, x_BT: Tensor, delta_BT: Tensor | None, weight_T: Tensor, out_BT: Tensor, eps: float) -> None:
        dtype = x_BT.dtype
        assert weight_T.dtype is dtype is out_BT.dtype, f"RMSNorm of {dtype} with a weight of {weight_T.dtype}"
        assert delta_BT is None or delta_BT.dtype is dtype, f"RMSNorm of {dtype} with a summand of {delta_BT.dtype}"
        delta = 0 if delta_BT is None else delta_BT.data_ptr()
        pointers = (x_BT.data_ptr(), delta, weight_T.data_ptr(), out_BT.data_ptr())
        self._functions["add_rms_norm", dtype](*pointers, *x_BT.shape, eps)

    def silu_mul(self, gate_up_BF: Tensor, out_BF: Tensor) -> None:
        rows, width = out_BF.shape
        assert gate_up_BF.dtype is out_BF.dtype, f"SwiGLU of {gate_up_BF.dtype} into {out_BF.dtype}"
        assert gate_up_BF.shape == (rows, 2 * width), f"gate and up {tuple(gate_up_BF.shape)} for {rows} x {width}"
        self._functions["silu_mul", out_BF.dtype](gate_up_BF.data_ptr(), out_BF.data_ptr(), rows, width)

    def rope_and_store(
        self,
        qkv: Tensor,
        norms: tuple[Tensor, Tensor] | None,
        angles: tuple[Tensor, Tensor],
        slots_B: Tensor,
        pools: tuple[Tensor, Tensor],
        out_BHD: Tensor,
        eps: float,
    ) -> None:
        rows, heads, dim = out_BHD.shape
        cos_sin, positions_B = angles
        keys, values = pools
        assert keys.dtype is values.dtype is qkv.dtype, f"queries are {qkv.dtype}, the KV pool is {keys.dtype}"
        q_norm, k_norm = (0, 0) if norms is None else (norms[0].data_ptr(), norms[1].data_ptr())
        pointers = (qkv.data_ptr(), q_norm, k_norm, cos_sin.data_ptr(), positions_B.data_ptr(), slots_B.data_ptr())
        pools_out = (keys.data_ptr(), values.data_ptr(), out_BHD.data_ptr())
        self._functions["rope_and_store", qkv.dtype](*pointers, *pools_out, rows, heads, keys.shape[1], dim, eps)

    def attention(
        self,
        queries_BHD: Tensor,
        pools: tuple[Tensor, Tensor],
        table: Tensor,
        rows_B: Tensor,
        lens_B: Tensor,
        scale: float,
    ) -> Tensor:
        """Return attention [B, H, D] of each query to the first ``lens_B`` >= 1 slots of its request.

        ``rows_B`` is the row of each request in the int32 page table ``table``.
        """
        out = torch.empty_like(queries_BHD)
        self._attend("attention", queries_BHD, pools, (table, rows_B, lens_B), (out,), scale)
        return out

    def partial_attention(
        self,
        queries_BHD: Tensor,
        pools: tuple[Tensor, Tensor],
        table: Tensor,
        rows_B: Tensor,
        lens_B: Tensor,
        scale: float,
    ) -> tuple[Tensor, Tensor]:
        """Compute ``attention``, but allow lengths of 0. Return float32 [B, H, D] and the log-sum-exp of scores [B, H].

        For a length of 0, the output is 0 and the log-sum-exp is -inf.
        """
        out, lse = (torch.empty(queries_BHD.shape[:n], dtype=torch.float32) for n in (3, 2))
        self._attend("partial_attention", queries_BHD, pools, (table, rows_B, lens_B), (out, lse), scale)
        return out, lse

    def _attend(
        self,
        kernel: str,
        queries_BHD: Tensor,
        pools: tuple[Tensor, Tensor],
        requests: tuple[Tensor, Tensor, Tensor],
        outputs: tuple[Tensor, ...],
        scale: float,
    ) -> None:
        """Call an attention kernel; ``requests``: page table, its rows [B], lengths [B]."""
        keys, values = pools
        table, rows_B, lens_B = requests
        size, heads, dim = queries_BHD.shape
        assert keys.dtype is values.dtype is queries_BHD.dtype, f"queries {queries_BHD.dtype}, KV pool {keys.dtype}"
        assert table.dtype is torch.int32 and (table.stride(1) == 1 or table.shape[1] < 2)
        assert rows_B.dtype is torch.int64 and lens_B.dtype is torch.int64
        scores, scores_per_thread = self.scores(table)
        self._functions[kernel, queries_BHD.dtype](
            *(queries_BHD.data_ptr(), keys.data_ptr(), values.data_ptr(), table.data_ptr(), table.stride(0)),
            *(rows_B.data_ptr(), lens_B.data_ptr(), *(out.data_ptr() for out in outputs)),
            *(scores.data_ptr(), scores_per_thread, size, heads, keys.shape[1], dim, scale),
        )

    def scores(self, table: Tensor) -> tuple[Tensor, int]:
        """Return a buffer for attention scores over any row of a page table, and its number of elements per thread."""
        per_thread = GROUP * (-(-table.shape[1] // LANES) * LANES + LANES)
        if self._workspace.numel() < per_thread * self.threads:
            self._workspace = torch.empty(per_thread * self.threads, dtype=torch.float32)
        return self._workspace, per_thread

    # ---- products ----------------------------------------------------------------------------------------------------
    def packs(self, weight: Tensor) -> bool:
        """Return True if a weight [M, K] can be packed."""
        return self.has_products and weight.dtype in SUFFIX and weight.shape[1] % DEPTH[weight.dtype] == 0

    def pack(self, weight: Tensor, old: Tensor | None = None) -> Tensor:
        """Pack a weight [M, K] into panels of ``COLUMNS`` outputs, for ``product`` and ``decode``.

        If given, ``old`` is overwritten and returned.
        """
        columns, depth = weight.shape
        assert self.packs(weight) and weight.is_contiguous(), f"{weight.dtype} {tuple(weight.shape)} cannot be packed"
        packed = torch.empty(packed_size(columns, depth), dtype=weight.dtype) if old is None else old
        assert packed.dtype is weight.dtype and packed.numel() == packed_size(columns, depth)
        self._functions["pack", weight.dtype](weight.data_ptr(), packed.data_ptr(), depth, columns)
        return packed

    def product(self, x: Tensor, packed: Tensor, bias: Tensor | None, out: Tensor) -> Tensor:
        """Write ``x`` [N, K] times a packed weight, plus ``bias``, to ``out`` [N, M], and return ``out``.

        Each row of the result is bitwise independent of the other rows.
        """
        rows, depth = x.shape
        columns = out.shape[1]
        x = x.contiguous()
        assert len(out) == rows and out.is_contiguous() and packed.numel() == packed_size(columns, depth)
        assert x.dtype is packed.dtype is out.dtype and (bias is None or bias.dtype is x.dtype)
        pointers = (x.data_ptr(), packed.data_ptr(), 0 if bias is None else bias.data_ptr(), out.data_ptr())
        self._functions["product", x.dtype](*pointers, rows, depth, columns)
        return out

    def decode(
        self, dtype: torch.dtype, layers: Tensor, step: Sequence[int], rows: int, scale: float, eps: float
    ) -> None:
        """Compute the layers, the final norm and the logits of a decode step.

        ``csrc/step.h`` defines ``layers`` [number of layers, 14] and ``step``; ``decode.py`` fills them.
        """
        assert layers.dtype is torch.int64 and layers.is_contiguous() and layers.shape[1:] == (LAYER_FIELDS,)
        assert len(step) == STEP_FIELDS
        fields = (ctypes.c_int64 * len(step))(*step)
        self._functions["decode", dtype](layers.data_ptr(), len(layers), fields, rows, scale, eps)

    # ---- sampling ----------------------------------------------------------------------------------------------------
    def sample(
        self, logits_BV: Tensor, temperatures_B: Tensor, top_k_B: Tensor, seeds_B: Tensor, positions_B: Tensor
    ) -> tuple[Tensor, Tensor] | None:
        """Sample from ``softmax(logits / temperature)``. Return int32 tokens [B] and their log-probabilities [B].

        A row with top-k <= 1 is greedy; other values of top-k have no effect. Return None if a row's distribution is not finite.
        """
        size, vocabulary = logits_BV.shape
        assert logits_BV.dtype is torch.float32 and logits_BV.stride(1) == 1
        columns = (temperatures_B.reshape(-1).contiguous(), top_k_B.contiguous(), seeds_B.contiguous())
        assert [c.dtype for c in columns] == [torch.float32, torch.int32, torch.int64]
        positions_B = positions_B.to(torch.int64).contiguous()
        blocks = -(-vocabulary // BLOCK)
        weights = torch.empty(blocks * BLOCK, dtype=torch.float32)
        sums = torch.empty(blocks, dtype=torch.float64)
        tokens, logprobs = (torch.empty(size, dtype=dtype) for dtype in (torch.int32, torch.float32))
        num_invalid: int = self._sample(
            *(logits_BV.data_ptr(), logits_BV.stride(0), size, vocabulary),
            *(column.data_ptr() for column in columns),
            *(t.data_ptr() for t in (positions_B, weights, sums, tokens, logprobs)),
        )
        return None if num_invalid else (tokens, logprobs)

    def uniform(self, seeds_B: Tensor, positions_B: Tensor) -> Tensor:
        """Return the random numbers that ``sample`` uses: float64 [B] in [0, 1)."""
        assert seeds_B.dtype is positions_B.dtype is torch.int64, (
            f"seeds {seeds_B.dtype}, positions {positions_B.dtype}"
        )
        assert seeds_B.shape == positions_B.shape, f"{len(seeds_B)} seeds, {len(positions_B)} positions"
        seeds_B, positions_B = seeds_B.contiguous(), positions_B.contiguous()
        out = torch.empty(len(seeds_B), dtype=torch.float64)
        self._uniforms(seeds_B.data_ptr(), positions_B.data_ptr(), out.data_ptr(), len(seeds_B))
        return out


def packed_size(columns: int, depth: int) -> int:
    """Return the number of elements of a packed weight [columns, depth]."""
    return -(-columns // COLUMNS) * COLUMNS * depth
