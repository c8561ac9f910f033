"""Root mean square norms (https://arxiv.org/abs/1910.07467): plain, zero-centred, over all heads, and gated per head."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.tensor_parallel import (
    ColumnParallelLinear,
    RowParallelLinear,
    copy_to_tensor_model_parallel_region,
    reduce_from_tensor_model_parallel_region,
    set_tensor_model_parallel_attributes,
)
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.utils import ensure_metadata_has_dp_cp_group, make_sharded_tensors_for_checkpoint
from torch import Tensor

from slime_like.train.megatron.platform.device import current_device


class RMSNorm(torch.nn.Module):
    """Norm over the last dimension. It supports sequence parallelism.

    A zero-centred norm (``layernorm_zero_centered_gamma``) has scale ``1 + weight``, as in Gemma and Qwen3-Next.
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
        """Return the output [L, 1, output_size] of [L, 1, input_size / tp], and None as its bias.

        With sequence parallelism, the output is this rank's part [L / tp, 1, output_size]. Collective over the tensor parallel
        ranks.
        """
        out, bias = super().forward(input_)
        assert bias is None
        return self.output_norm(out), None


class NormedQKV(ColumnParallelLinear):
    """Projection to queries, keys and values, followed by a norm over all query heads and another over all key heads.

    The norms are not megatron's ``q_layernorm`` and ``k_layernorm``, whose gradients megatron sums over tensor parallel
    ranks as if all heads shared the weights.
    """

    def __init__(self, input_size: int, output_size: int, *, config: TransformerConfig, **kwargs: Any) -> None:
        super().__init__(input_size, output_size, config=config, **kwargs)
        heads, groups, dim = config.num_attention_heads, config.num_query_groups, config.kv_channels
        assert groups is not None and dim is not None
        self.shape_of_output = groups // config.tensor_model_parallel_size, heads // groups + 2, dim
        self.query_norm = ProjectionNorm(config, heads * dim)
        self.key_norm = ProjectionNorm(config, groups * dim)

    def forward(self, *args: Any, **kwargs: Any) -> tuple[Tensor, Any]:
        """Return the output [L, 1, output_size / tp] of [L, 1, input_size], and None as its bias.

        With sequence parallelism, the input is this rank's part [L / tp, 1, input_size]. Channels are in the order of
        ``families.base.QKV``. Collective over the tensor parallel ranks.
        """
        out, bias = super().forward(*args, **kwargs)
        assert bias is None
        groups, rows, dim = self.shape_of_output
        query, key, value = out.unflatten(-1, (groups, rows, dim)).split((rows - 2, 1, 1), -2)
        normed = (norm(x.flatten(-3)).view(x.shape) for norm, x in ((self.query_norm, query), (self.key_norm, key)))
        return torch.cat((*normed, value), -2).flatten(-3), None

    def sharded_state_dict(self, prefix: str = "", sharded_offsets: Any = (), metadata: Any = None) -> dict[str, Any]:
        """Return megatron's sharded state, in which each weight is split over tensor parallel ranks."""
        state = self.state_dict(prefix="", keep_vars=True)
        return make_sharded_tensors_for_checkpoint(
            state,
            prefix,
            dict.fromkeys(state, 0),
            sharded_offsets,
            tp_group=self.tp_group,  # pyright: ignore[reportArgumentType]  megatron annotates a group or an int
            dp_cp_group=ensure_metadata_has_dp_cp_group(metadata)["dp_cp_group"],
        )


class ProjectionNorm(torch.nn.Module):
    """Norm over all heads of a projection, where each tensor parallel rank has some of the heads.

    A token's sum of squares is reduced over the ranks in forward, and the gradient of this sum in backward. A rank has the
    weights of its own heads and sees all tokens, so the gradients of the weights need no reduction.
    """

    def __init__(self, config: TransformerConfig, num_channels: int) -> None:
        super().__init__()
        self.eps = config.layernorm_epsilon
        self.num_channels = num_channels
        local = torch.ones(num_channels // config.tensor_model_parallel_size, dtype=config.params_dtype)
        self.weight = torch.nn.Parameter(local.to(current_device()))
        set_tensor_model_parallel_attributes(self.weight, is_parallel=True, dim=0, stride=1)

    def forward(self, x: Tensor) -> Tensor:
        """Map [L, 1, num_channels / tp] to the same shape, computed in at least float32 and rounded once.

        Collective over the tensor parallel ranks.
        """
        wide = x.float() if x.dtype in _HALF else x
        squares = reduce_from_tensor_model_parallel_region(wide.square().sum(-1, keepdim=True))
        mean = copy_to_tensor_model_parallel_region(squares) / self.num_channels
        normed = wide * (mean + self.eps).rsqrt() * self.weight.to(wide.dtype)
        return normed.to(x.dtype)


class GatedHeadNorm(torch.nn.Module):
    """``rms_norm(x) * weight * silu(gate)`` over the channels of a head, never zero-centred.

    All heads share the weight, and tensor parallel ranks have different heads, so the gradient of the weight is summed over
    these ranks: with sequence parallelism by megatron after the last micro-batch of an optimizer step, otherwise by this module.
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
