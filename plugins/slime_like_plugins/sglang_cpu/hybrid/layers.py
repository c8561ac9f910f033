"""Gates, gated norms, and splits of projections in the layers of hybrid models."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

GATES = {"silu": F.silu, "swish": F.silu, "sigmoid": torch.sigmoid}
FIX = "set placement.device=cuda, or use another model"
NO_SPECULATION = (
    "engines on a CPU do not support speculative decoding of hybrid models: set placement.device=cuda, or remove "
    "rollout.sglang.speculative_algorithm"
)


def split_by_key_head(
    qkvz: Tensor, ba: Tensor, heads: int, value_heads: int, key_dim: int, value_dim: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Split Qwen3-Next's projections, interleaved by key head, into queries, keys and values (in one tensor), z, b and a.

    This function replaces ``fused_qkvzba_split_reshape_cat``. With r = HV / H, the arguments are qkvz [T, H (2 K + 2 r V)] and
    ba [T, 2 HV]; the results are [T, 2 H K + HV V], [T, HV, V], [T, HV] and [T, HV].
    """
    tokens, ratio = len(qkvz), value_heads // heads
    q, k, v, z = qkvz.view(tokens, heads, -1).split([key_dim, key_dim, ratio * value_dim, ratio * value_dim], dim=-1)
    b, a = ba.view(tokens, heads, 2 * ratio).split([ratio, ratio], dim=-1)
    mixed = torch.cat([part.reshape(tokens, -1) for part in (q, k, v)], -1)
    return mixed, z.reshape(tokens, value_heads, value_dim), b.reshape(tokens, -1), a.reshape(tokens, -1)


def split_contiguous(
    qkvz: Tensor, ba: Tensor, heads: int, value_heads: int, key_dim: int, value_dim: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Split Qwen3.5's projections, which are not interleaved, into the results of ``split_by_key_head``.

    This function replaces ``fused_qkvzba_split_reshape_cat_contiguous``.
    """
    mixed = 2 * heads * key_dim + value_heads * value_dim
    z = qkvz[:, mixed:].reshape(len(qkvz), value_heads, value_dim)
    return qkvz[:, :mixed].contiguous(), z, ba[:, :value_heads].contiguous(), ba[:, value_heads:].contiguous()


def gated_norm(x: Tensor, gate: Tensor, weight: Tensor, eps: float, activation: str) -> Tensor:
    """Return ``rms_norm(x) * weight * activation(gate)`` over the last dimension, computed in float32."""
    normed = F.rms_norm(x.float(), x.shape[-1:], eps=eps) * weight.float()
    return (normed * GATES[activation](gate.float())).to(x.dtype)


def fused_norm_forward(module: Any, x: Tensor, g: Tensor, **options: Any) -> Tensor:
    """Return the gated norm of ``x``. Raises ``NotImplementedError`` if an option is set.

    This function replaces ``FusedRMSNormGated.forward`` (Qwen3-Next).
    """
    if unsupported := [name for name, value in options.items() if value is not None and value is not False]:
        raise NotImplementedError(f"engines on a CPU do not support a gated norm with {', '.join(unsupported)}: {FIX}")
    return gated_norm(x, g, module.weight, module.eps, module.activation)


def layernorm_fn(  # noqa: PLR0913  (a signature of SGLang)
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    z: Tensor | None = None,
    eps: float = 1e-6,
    group_size: int | None = None,
    norm_before_gate: bool = True,
    is_rms_norm: bool = False,
    activation: str = "swish",
) -> Tensor:
    """Return the norm of ``x``, gated by ``z``. Raises ``NotImplementedError`` for norms that Qwen does not have.

    This function replaces ``sglang.kernels.ops.attention.fla.layernorm_gated.layernorm_fn`` (Qwen3.5).
    """
    if z is None or bias is not None or group_size is not None or not norm_before_gate or not is_rms_norm:
        raise NotImplementedError(f"engines on a CPU support no gated norm other than Qwen's: {FIX}")
    return gated_norm(x, z, weight, eps, activation)


def fused_sigmoid_mul(attn_output: Tensor, gate: Tensor, inplace: bool = False, quant: bool = False) -> Tensor:
    """Return attention's output [T, H D] times the sigmoid of its gate, [T, H, D] or [T, H D].

    If ``inplace``, overwrite ``attn_output``. Raises ``NotImplementedError`` if ``quant`` asks for a quantised result.
    """
    if quant:
        raise NotImplementedError(f"engines on a CPU do not support a quantised attention output: {FIX}")
    gated = (attn_output.float() * gate.reshape(attn_output.shape).float().sigmoid()).to(attn_output.dtype)
    return attn_output.copy_(gated) if inplace else gated


def fused_gate_sigmoid_mul_add(hidden: Tensor, gate_weight: Tensor, shared: Tensor, routed: Tensor) -> None:
    """Add the shared expert: ``routed += sigmoid(hidden @ gate_weight) * shared``, in place."""
    gate_T1 = (hidden.float() @ gate_weight.float()).sigmoid()[:, None]
    routed.copy_((routed.float() + gate_T1 * shared.float()).to(routed.dtype))
