"""C kernels for training (``csrc``) on contiguous host tensors.

Arguments that could make C read out of bounds are checked here.

Axes: N tokens, H hidden, F output features of SwiGLU, G groups (KV heads), R query heads per group, D head dimension,
V vocabulary.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from slime_like_plugins.sglang_cpu.build import build

SOURCE = Path(__file__).parent / "csrc"
LANES = 16  # attention needs head dimensions that are multiples of this number
QUERIES = 8  # queries that attention computes together; the same constant is in csrc/rows.h
SUFFIX = {torch.float32: "f32", torch.bfloat16: "bf16"}
_POINTER, _INT64, _FLOAT, _INT = ctypes.c_void_p, ctypes.c_int64, ctypes.c_float, ctypes.c_int
_SIGNATURES = {
    "rms_norm": [*[_POINTER] * 4, *[_INT64] * 2, _FLOAT, _INT],
    "rms_norm_back": [*[_POINTER] * 6, *[_INT64] * 2, _INT],
    "swiglu": [*[_POINTER] * 3, *[_INT64] * 2, _INT],
    "swiglu_back": [*[_POINTER] * 5, *[_INT64] * 2, _INT],
    "split_rotate": [*[_POINTER] * 8, *[_INT64] * 4, _FLOAT, _INT],
    "split_rotate_back": [*[_POINTER] * 11, *[_INT64] * 4, _INT],
    "attention": [*[_POINTER] * 7, *[_INT64] * 5, _FLOAT, _INT],
    "attention_back": [*[_POINTER] * 10, *[_INT64] * 5, _FLOAT, _INT],
    "log_probs": [*[_POINTER] * 5, *[_INT64] * 2, _FLOAT, _INT],
    "log_probs_back": [*[_POINTER] * 7, *[_INT64] * 2, _FLOAT, _INT],
}


@dataclass(frozen=True, slots=True)
class QkvHeads:
    """Layout of the QKV projection's output: G groups, each of R query heads, a key head and a value head."""

    groups: int
    queries: int
    dim: int

    @property
    def width(self) -> int:
        """Number of elements per token."""
        return self.groups * (self.queries + 2) * self.dim


class TrainKernels:
    """Bindings to the shared object at ``path``. A weight must have the dtype of the tensor that it multiplies."""

    def __init__(self, path: Path) -> None:
        library = ctypes.CDLL(str(path))
        self._functions: dict[tuple[str, torch.dtype], ctypes._NamedFuncPointer] = {}  # pyright: ignore[reportPrivateUsage]  ctypes has no public name for the type
        for dtype, suffix in SUFFIX.items():
            for name, arguments in _SIGNATURES.items():
                function = library[f"{name}_{suffix}"]
                function.argtypes, function.restype = arguments, None
                self._functions[name, dtype] = function

    def rms_norm(self, x_NH: Tensor, weight_H: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        """Return ``rms_norm(x) * weight`` [N, H], and the reciprocals of the rows' root mean squares, F32 [N]."""
        n, h = x_NH.shape
        _check(x_NH.dtype, (x_NH, (n, h)), (weight_H, (h,)))
        out_NH, inverse_N = torch.empty_like(x_NH), x_NH.new_empty(n, dtype=torch.float32)
        self._call("rms_norm", x_NH.dtype, (x_NH, weight_H, out_NH, inverse_N), n, h, eps)
        return out_NH, inverse_N

    def rms_norm_back(
        self, x_NH: Tensor, weight_H: Tensor, inverse_N: Tensor, grad_NH: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Return the gradients of ``x`` [N, H] and of the weight [H]."""
        n, h = x_NH.shape
        _check(x_NH.dtype, (x_NH, (n, h)), (weight_H, (h,)), (grad_NH, (n, h)))
        _check(torch.float32, (inverse_N, (n,)))
        grad_x_NH, shares = torch.empty_like(x_NH), x_NH.new_zeros((_num_threads(), h), dtype=torch.float32)
        self._call("rms_norm_back", x_NH.dtype, (x_NH, weight_H, inverse_N, grad_NH, grad_x_NH, shares), n, h)
        return grad_x_NH, shares.sum(0).to(weight_H.dtype)

    def swiglu(self, gate_up: Tensor, scale_N: Tensor | None = None) -> Tensor:
        """Return silu(gate) * up [N, F], times ``scale_N`` F32 if given; ``gate_up`` [N, 2 F] holds gate, then up."""
        n, f = gate_up.shape[0], gate_up.shape[1] // 2
        _check(gate_up.dtype, (gate_up, (n, 2 * f)))
        _check_scale(scale_N, n)
        out_NF = gate_up.new_empty((n, f))
        self._call("swiglu", gate_up.dtype, (gate_up, scale_N, out_NF), n, f)
        return out_NF

    def swiglu_back(
        self, gate_up: Tensor, grad_NF: Tensor, scale_N: Tensor | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """Return the gradients of ``gate_up`` [N, 2 F] and of the scale F32 [N] (None if there is no scale)."""
        n, f = grad_NF.shape
        _check(gate_up.dtype, (gate_up, (n, 2 * f)), (grad_NF, (n, f)))
        _check_scale(scale_N, n)
        grad_gate_up = torch.empty_like(gate_up)
        grad_scale_N = None if scale_N is None else torch.empty_like(scale_N)
        self._call("swiglu_back", gate_up.dtype, (gate_up, scale_N, grad_NF, grad_gate_up, grad_scale_N), n, f)
        return grad_gate_up, grad_scale_N

    def split_rotate(
        self, qkv: Tensor, norms: tuple[Tensor, Tensor] | None, cos_sin_ND: Tensor, heads: QkvHeads, eps: float
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Split ``qkv`` [N, G (R + 2) D] into queries [N, G R, D], keys and values [N, G, D], all F32.

        If ``norms`` has weights (of queries and keys, [D] each), queries and keys are normalised. With or without norms, they
        are then rotated by halves; ``cos_sin`` has D / 2 cosines, then sines. The fourth result F32 [N, G, R + 1] is an input
        of ``split_rotate_back``: the reciprocals of the heads' root mean squares, or 1 without norms.
        """
        n, g, r, d = len(qkv), heads.groups, heads.queries, heads.dim
        _check_qkv(qkv, norms, cos_sin_ND, heads)
        empty = lambda *shape: qkv.new_empty(shape, dtype=torch.float32)  # noqa: E731
        out = (empty(n, g * r, d), empty(n, g, d), empty(n, g, d), empty(n, g, r + 1))
        self._call("split_rotate", qkv.dtype, (qkv, *(norms or (None, None)), cos_sin_ND, *out), n, g, r, d, eps)
        return out

    def split_rotate_back(
        self,
        qkv: Tensor,
        norms: tuple[Tensor, Tensor] | None,
        cos_sin_ND: Tensor,
        inverse: Tensor,
        grads: tuple[Tensor, Tensor, Tensor],
        heads: QkvHeads,
    ) -> tuple[Tensor, Tensor]:
        """Return the gradients of ``qkv`` [N, G (R + 2) D] and of the norms' weights F32 [2, D].

        If there are no norms, the gradients of their weights are 0.
        """
        n, g, r, d = len(qkv), heads.groups, heads.queries, heads.dim
        _check_qkv(qkv, norms, cos_sin_ND, heads)
        shapes = ((n, g * r, d), (n, g, d), (n, g, d), (n, g, r + 1))
        _check(torch.float32, *zip((*grads, inverse), shapes, strict=True))
        grad_qkv = torch.empty_like(qkv)
        shares = qkv.new_zeros((_num_threads(), 2, d), dtype=torch.float32)
        scratch = qkv.new_empty((_num_threads(), d), dtype=torch.float32)
        arrays = (qkv, *(norms or (None, None)), cos_sin_ND, inverse, *grads)
        self._call("split_rotate_back", qkv.dtype, (*arrays, grad_qkv, shares, scratch), n, g, r, d)
        return grad_qkv, shares.sum(0)

    def attention(
        self, qkv: tuple[Tensor, Tensor, Tensor], cu_seqlens: Tensor, scale: float, dtype: torch.dtype
    ) -> tuple[Tensor, Tensor]:
        """Return causal attention [N, G R, D] in ``dtype``, and its log-sum-exps F32 [N, G R].

        ``qkv``: queries [N, G R, D], keys and values [N, G, D], all F32. ``cu_seqlens`` I32 [S + 1]: bounds of the S sequences,
        from 0 to N.
        """
        n, h, d = qkv[0].shape
        sizes = _check_attention(qkv, cu_seqlens)
        out, log_sums = qkv[0].new_empty((n, h, d), dtype=dtype), qkv[0].new_empty((n, h))
        scratch = _scratch(qkv[0], sizes, 1)
        self._call("attention", dtype, (*qkv, cu_seqlens, out, log_sums, scratch), *sizes, scale)
        return out, log_sums

    def attention_back(
        self,
        qkv: tuple[Tensor, Tensor, Tensor],
        cu_seqlens: Tensor,
        log_sums: Tensor,
        grad: Tensor,
        scale: float,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return the F32 gradients of queries, keys and values."""
        sizes = _check_attention(qkv, cu_seqlens)
        _check(torch.float32, (log_sums, tuple(qkv[0].shape[:2])))
        _check(grad.dtype, (grad, tuple(qkv[0].shape)))
        query, key, value = qkv
        grads = (torch.empty_like(query), torch.zeros_like(key), torch.zeros_like(value))
        scratch = _scratch(query, sizes, 2)
        self._call("attention_back", grad.dtype, (*qkv, cu_seqlens, log_sums, grad, *grads, scratch), *sizes, scale)
        return grads

    def log_probs(
        self, logits_NV: Tensor, target_N: Tensor, temperature: float, *, entropy: bool
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """Return the log-probabilities of ``target`` (I64) under ``softmax(logits / temperature)``: F32 [N].

        Also return the log-sum-exps of the scaled logits, F32 [N], and with ``entropy`` the entropies, F32 [N].
        """
        n, v = _check_logits(logits_NV, target_N)
        columns = tuple(logits_NV.new_empty(n, dtype=torch.float32) for _ in range(3 if entropy else 2))
        logprobs_N, log_sums_N, entropies_N = columns if entropy else (*columns, None)
        out = (logprobs_N, log_sums_N, entropies_N)
        self._call("log_probs", logits_NV.dtype, (logits_NV, target_N, *out), n, v, 1 / temperature)
        return out

    def log_probs_back(
        self,
        logits_NV: Tensor,
        target_N: Tensor,
        scores: tuple[Tensor, Tensor | None],
        grads: tuple[Tensor, Tensor | None],
        temperature: float,
        out_NV: Tensor,
    ) -> None:
        """Write the logits' gradient to ``out``, which may be ``logits`` itself.

        ``scores``: log-sum-exps and entropies F32 [N] from ``log_probs``. ``grads``: gradients F32 [N] of log-probabilities and
        entropies.
        """
        n, v = _check_logits(logits_NV, target_N)
        _check(logits_NV.dtype, (out_NV, (n, v)))
        assert grads[1] is None or scores[1] is not None, "a gradient of entropies needs the entropies"
        _check(torch.float32, *((column, (n,)) for column in (*scores, *grads) if column is not None))
        arrays = (logits_NV, target_N, *scores, *grads, out_NV)
        self._call("log_probs_back", logits_NV.dtype, arrays, n, v, 1 / temperature)

    def _call(self, name: str, dtype: torch.dtype, tensors: tuple[Tensor | None, ...], *numbers: float) -> None:
        pointers = (0 if tensor is None else tensor.data_ptr() for tensor in tensors)
        self._functions[name, dtype](*pointers, *numbers, _num_threads())


def make_kernels() -> TrainKernels:
    """Return the kernels, compiled unless they are cached.

    Raises ``BuildError`` if they cannot be compiled, ``OSError`` if they cannot be loaded.
    """
    return TrainKernels(build(SOURCE).path)


@cache
def kernels() -> TrainKernels:
    """Return the kernels of this process. Raises the errors of ``make_kernels``."""
    return make_kernels()


def _num_threads() -> int:
    return torch.get_num_threads()


def _check(dtype: torch.dtype, *pairs: tuple[Tensor, tuple[int, ...]]) -> None:
    for tensor, shape in pairs:
        assert tensor.dtype is dtype, f"the tensor is {tensor.dtype}, expected {dtype}"
        assert tensor.shape == shape, f"the shape is {tuple(tensor.shape)}, expected {shape}"
        assert tensor.is_contiguous() and tensor.device.type == "cpu", f"{tensor.device}, strides {tensor.stride()}"


def _check_scale(scale_N: Tensor | None, n: int) -> None:
    if scale_N is not None:
        _check(torch.float32, (scale_N, (n,)))


def _check_qkv(qkv: Tensor, norms: tuple[Tensor, Tensor] | None, cos_sin_ND: Tensor, heads: QkvHeads) -> None:
    assert heads.dim % 2 == 0, f"the head dimension {heads.dim} is odd"
    _check(qkv.dtype, (qkv, (len(qkv), heads.width)), *((weight, (heads.dim,)) for weight in norms or ()))
    _check(torch.float32, (cos_sin_ND, (len(qkv), heads.dim)))


def _check_logits(logits_NV: Tensor, target_N: Tensor) -> tuple[int, int]:
    n, v = logits_NV.shape
    _check(logits_NV.dtype, (logits_NV, (n, v)))
    _check(torch.int64, (target_N, (n,)))
    assert n == 0 or 0 <= int(target_N.min()) <= int(target_N.max()) < v, f"a target is outside the {v} logits"
    return n, v


def _check_attention(qkv: tuple[Tensor, Tensor, Tensor], cu_seqlens: Tensor) -> tuple[int, ...]:
    """Assert that the arguments of attention fit each other, and return their sizes.

    These are the number of sequences, the longest length (rounded up to a multiple of ``2 * LANES``), the number of KV heads, the
    number of query heads per KV head, and the head dimension.
    """
    (n, h, d), g = qkv[0].shape, qkv[1].shape[1]
    assert d % LANES == 0 and h % g == 0, f"{h} query heads of dimension {d} with {g} KV heads"
    _check(torch.float32, *zip(qkv, ((n, h, d), (n, g, d), (n, g, d)), strict=True))
    _check(torch.int32, (cu_seqlens, (len(cu_seqlens),)))
    lengths = cu_seqlens.diff()
    assert int(cu_seqlens[0]) == 0 and int(cu_seqlens[-1]) == n and int(lengths.min()) >= 0, (
        f"cu_seqlens {cu_seqlens.tolist()} are not the bounds of {n} tokens"
    )
    return len(lengths), -(-int(lengths.max()) // (2 * LANES)) * 2 * LANES, g, h // g, d


def _scratch(like: Tensor, sizes: tuple[int, ...], copies: int) -> Tensor:
    """Return scratch memory for attention, with room for each thread; ``sizes`` come from ``_check_attention``.

    Each thread gets ``copies`` blocks. A block has room for one KV head's keys, and for the weights and results of ``QUERIES``
    queries.
    """
    _, capacity, _, _, d = sizes
    return like.new_empty((_num_threads(), copies * (d * capacity + QUERIES * (capacity + d))))
