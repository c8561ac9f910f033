"""Autograd functions over the C kernels. They save their inputs and at most one number per row and head for backward."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from slime_like_plugins.megatron_cpu.kernels import QkvHeads, TrainKernels


class RMSNormFunction(torch.autograd.Function):
    """RMSNorm of x [..., H] with a weight [H]; the result has the shape of x.

    The other inputs are eps and the kernels.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight_H: Tensor, eps: float, kernels: TrainKernels) -> Tensor:
        rows = x.reshape(-1, x.shape[-1]).contiguous()
        out, inverse = kernels.rms_norm(rows, weight_H, eps)
        ctx.save_for_backward(rows, weight_H, inverse)
        ctx.kernels = kernels
        return out.view(x.shape)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        rows, weight_H, inverse = ctx.saved_tensors
        grad = grads[0].reshape(rows.shape).contiguous()
        grad_x, grad_weight = ctx.kernels.rms_norm_back(rows, weight_H, inverse, grad)
        return grad_x.view(grads[0].shape), grad_weight, None, None


class SwiGLUFunction(torch.autograd.Function):
    """SwiGLU, scaled by row.

    The inputs are gate and up [..., 2 F], a scale F32 [N] for the N rows or None, and the kernels. The result is [..., F].
    """

    @staticmethod
    def forward(ctx: Any, gate_up: Tensor, scale_N: Tensor | None, kernels: TrainKernels) -> Tensor:
        rows = gate_up.reshape(-1, gate_up.shape[-1]).contiguous()
        scale_N = None if scale_N is None else scale_N.contiguous()
        ctx.save_for_backward(rows, scale_N)
        ctx.kernels, ctx.shape = kernels, gate_up.shape
        return kernels.swiglu(rows, scale_N).view(*gate_up.shape[:-1], rows.shape[1] // 2)  # also valid for 0 rows

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        rows, scale_N = ctx.saved_tensors
        grad = grads[0].reshape(len(rows), rows.shape[1] // 2).contiguous()
        grad_gate_up, grad_scale_N = ctx.kernels.swiglu_back(rows, grad, scale_N)
        return grad_gate_up.view(ctx.shape), grad_scale_N, None


class SplitRotateFunction(torch.autograd.Function):
    """Split of projected queries, keys and values, with norms and rotation of queries and keys.

    The inputs are qkv [N, G (R + 2) D], the weights of query and key norm [D] or None, cos_sin [N, D], heads, eps and
    the kernels. The results are queries [N, G R, D], keys and values [N, G, D], all F32.
    """

    @staticmethod
    def forward(
        ctx: Any,
        qkv: Tensor,
        q_weight: Tensor | None,
        k_weight: Tensor | None,
        cos_sin_ND: Tensor,
        heads: QkvHeads,
        eps: float,
        kernels: TrainKernels,
    ) -> tuple[Tensor, Tensor, Tensor]:
        qkv = qkv.contiguous()
        norms = None if q_weight is None or k_weight is None else (q_weight, k_weight)
        *out, inverse = kernels.split_rotate(qkv, norms, cos_sin_ND, heads, eps)
        ctx.save_for_backward(qkv, q_weight, k_weight, cos_sin_ND, inverse)
        ctx.heads, ctx.kernels = heads, kernels
        queries, keys, values = out
        return queries, keys, values

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        qkv, q_weight, k_weight, cos_sin_ND, inverse = ctx.saved_tensors
        norms = None if q_weight is None else (q_weight, k_weight)
        grad_queries, grad_keys, grad_values = (grad.contiguous() for grad in grads)
        outputs = (grad_queries, grad_keys, grad_values)
        grad_qkv, grad_norms = ctx.kernels.split_rotate_back(qkv, norms, cos_sin_ND, inverse, outputs, ctx.heads)
        norm_grads = (None, None) if norms is None else grad_norms.to(qkv.dtype).unbind(0)
        return grad_qkv, *norm_grads, None, None, None, None


class AttentionFunction(torch.autograd.Function):
    """Causal attention over packed sequences.

    The inputs are queries [N, G R, D], keys and values [N, G, D], all F32, cu_seqlens, scale, the dtype of the result and
    the kernels; the result is [N, G R, D].
    """

    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        cu_seqlens: Tensor,
        scale: float,
        dtype: torch.dtype,
        kernels: TrainKernels,
    ) -> Tensor:
        qkv = (query.contiguous(), key.contiguous(), value.contiguous())
        out, log_sums = kernels.attention(qkv, cu_seqlens, scale, dtype)
        ctx.save_for_backward(*qkv, cu_seqlens, log_sums)
        ctx.scale, ctx.kernels = scale, kernels
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        query, key, value, cu_seqlens, log_sums = ctx.saved_tensors
        grad = grads[0].contiguous()
        input_grads = ctx.kernels.attention_back((query, key, value), cu_seqlens, log_sums, grad, ctx.scale)
        return *input_grads, None, None, None, None
