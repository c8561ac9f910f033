"""Root mean square norms (https://arxiv.org/abs/1910.07467): plain, zero-centred, and gated per head."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.tensor_parallel import RowParallelLinear, copy_to_tensor_model_parallel_region
from megatron.core.transformer import TransformerConfig
from torch import Tensor

from slime_like.train.megatron.platform.device import current_device


class RMSNorm(torch.nn.Module):
    """Norm over the last dimension that supports sequence parallelism.

    A zero-centred norm (``layernorm_zero_centered_gamma``) has scale ``1 + weight``, as Gemma and Qwen3-Next store it.
    This scale is float32, because a 16-bit ``1 + weight`` would round the weight away.
    """

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-6, **_: Any) -> None:
        super().__init__()
        self.eps = eps
        self.zero_centered = config.layernorm_zero_centered_gamma
        initial = torch.zeros if self.zero_centered else torch.ones
        self.weight = _norm_weight(config, initial(hidden_size, dtype=config.params_dtype))

    def forward(self, x: Tensor) -> Tensor:
        """Map [..., hidden] to [..., hidden]."""
        if not self.zero_centered:
            return F.rms_norm(x, self.weight.shape, self.weight, self.eps)
        scale = 1 + self.weight.float()
        if x.dtype in _HALF:
            return _HalfNorm.apply(x, scale, None, self.eps)
        return F.rms_norm(x, scale.shape, scale.to(x.dtype), self.eps)


class NormedOutput(RowParallelLinear):
    """Output projection of attention or MLP, followed by ``norm``."""

    def __init__(
        self, input_size: int, output_size: int, *, config: TransformerConfig, norm: type[RMSNorm], **kwargs: Any
    ) -> None:
        super().__init__(input_size, output_size, config=config, **kwargs)
        self.output_norm = norm(config, output_size, config.layernorm_epsilon)

    def forward(self, input_: Tensor) -> tuple[Tensor, Any]:
        """Map [L, 1, input_size] to [L, 1, output_size]; there is no bias."""
        out, bias = super().forward(input_)
        assert bias is None
        return self.output_norm(out), None


class GatedHeadNorm(torch.nn.Module):
    """``rms_norm(x) * weight * silu(gate)`` over the channels of a head, never zero-centred.

    All heads share the weight, and tensor parallel ranks have different heads, so the gradient of the weight is summed over
    these ranks: with sequence parallelism by megatron at the end of an optimizer step, otherwise by this module.
    """

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-6, **_: Any) -> None:
        super().__init__()
        self.eps = eps
        self.sums_gradient = config.tensor_model_parallel_size > 1 and not config.sequence_parallel
        self.weight = _norm_weight(config, torch.ones(hidden_size, dtype=config.params_dtype))

    def forward(self, x: Tensor, gate: Tensor) -> Tensor:
        """Map x and gate [..., channels] to [..., channels], computed in at least float32 and rounded once."""
        weight = copy_to_tensor_model_parallel_region(self.weight) if self.sums_gradient else self.weight
        if x.dtype in _HALF:
            return _HalfNorm.apply(x, weight.float(), gate, self.eps)
        return F.rms_norm(x, weight.shape, weight.to(x.dtype), self.eps) * F.silu(gate)


_HALF = (torch.bfloat16, torch.float16)


def _norm_weight(config: TransformerConfig, initial: Tensor) -> torch.nn.Parameter:
    weight = torch.nn.Parameter(initial.to(current_device()))
    setattr(weight, "sequence_parallel", config.sequence_parallel)  # noqa: B010 (read by finalize_model_grads)
    return weight


class _HalfNorm(torch.autograd.Function):
    """Norm of 16-bit values with a float32 scale and an optional gate. Only the inputs are saved for backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, scale: Tensor, gate: Tensor | None, eps: float) -> Tensor:
        ctx.save_for_backward(x, scale, gate)
        ctx.eps = eps
        out = _normalise(x, eps)[0] * scale
        return (out if gate is None else out * F.silu(gate.float())).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, Tensor | None, None]:
        x, scale, gate = ctx.saved_tensors
        normed, inverse = _normalise(x, ctx.eps)
        grad, gate_grad = grads[0].float(), None
        if gate is not None:
            wide = gate.float()
            sigmoid = wide.sigmoid()
            slope = sigmoid * (1 + wide * (1 - sigmoid))
            gate_grad = (grad * normed * scale * slope).to(gate.dtype)
            grad = grad * wide * sigmoid
        scale_grad = (grad * normed).flatten(0, -2).sum(0)
        grad = grad * scale
        x_grad = inverse * (grad - normed * (grad * normed).mean(-1, keepdim=True))
        return x_grad.to(x.dtype), scale_grad, gate_grad, None


def _normalise(x: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Return ``x`` over its root mean square, and the inverse of the root mean square [..., 1], in float32."""
    wide = x.float()
    inverse = wide.square().mean(-1, keepdim=True).add_(eps).rsqrt_()
    return wide * inverse, inverse
