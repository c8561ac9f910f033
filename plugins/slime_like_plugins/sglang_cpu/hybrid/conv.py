"""Causal convolution of packed sequences with SGLang's pool of convolution states.

Axes: T tokens of the packed batch, B requests, D channels, W taps. A state holds the last W - 1 inputs of a request.
It must be stored in at least the precision of the inputs (``SGLANG_MAMBA_CONV_DTYPE``, default bfloat16); otherwise decoded
tokens would be convolved with rounded inputs. For 16-bit inputs, sums are accumulated in float32, and the result is rounded
once, after the activation, as in the trainer.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from slime_like_plugins.sglang_cpu.hybrid.layers import FIX, NO_SPECULATION


def causal_conv1d_fn(  # noqa: PLR0913  (a signature of SGLang)
    x_DT: Tensor,
    weight_DW: Tensor,
    bias_D: Tensor | None,
    *,
    conv_states: Tensor,
    has_initial_state: Tensor,
    cache_indices: Tensor,
    query_start_loc: Tensor,
    seq_lens_cpu: Sequence[int],
    activation: str | None = "silu",
) -> Tensor:
    """Return the convolution of the packed inputs ``x_DT``, in the same shape.

    The states of requests with ``has_initial_state`` [B] are read, and those of all requests are written. This function
    replaces ``sglang.kernels.ops.mamba.causal_conv1d_triton.causal_conv1d_fn``. Padding columns after the last request
    are 0 in the result. Raises the errors of ``check_precision`` and ``apply_activation``.
    """
    check_precision(conv_states, x_DT)
    lengths = torch.tensor([int(length) for length in seq_lens_cpu])
    requests, history = len(lengths), weight_DW.shape[1] - 1
    slots = cache_indices[:requests].long()
    num_tokens = int(lengths.sum())
    # Each request's inputs follow its W - 1 previous inputs: row t of request s becomes row t + (s + 1) * (W - 1).
    request_T = torch.repeat_interleave(torch.arange(requests), lengths)
    rows_T = torch.arange(num_tokens) + (request_T + 1) * history
    starts_B = torch.cumsum(lengths, 0) - lengths + torch.arange(requests) * history
    extended = x_DT.new_empty(num_tokens + requests * history, x_DT.shape[0], dtype=sum_dtype(x_DT))
    extended[rows_T] = x_DT[:, :num_tokens].t().to(extended.dtype)
    initial_BHD = torch.where(has_initial_state[:requests, None, None], conv_states[slots].mT, 0).to(extended.dtype)
    extended[starts_B[:, None] + torch.arange(history)] = initial_BHD
    weight_DW = weight_DW.to(extended.dtype)
    out_TD = extended[rows_T - history] * weight_DW[:, 0]
    for tap in range(1, history + 1):
        out_TD.addcmul_(extended[rows_T - history + tap], weight_DW[:, tap])
    conv_states[slots] = extended[(starts_B + lengths)[:, None] + torch.arange(history)].mT.to(conv_states.dtype)
    return F.pad(apply_activation(out_TD, bias_D, activation).to(x_DT.dtype).t(), (0, x_DT.shape[1] - num_tokens))


def causal_conv1d_update(
    x_BD: Tensor,
    conv_state: Tensor,
    weight_DW: Tensor,
    bias_D: Tensor | None = None,
    activation: str | None = None,
    *,
    conv_state_indices: Tensor,
    **speculative: Any,
) -> Tensor:
    """Return the convolution of one token per request, ``x_BD``, in the same shape; read and write the states.

    This function replaces ``sglang.kernels.ops.mamba.causal_conv1d_triton.causal_conv1d_update``. Raises
    ``NotImplementedError`` for several tokens per request or any ``speculative`` argument, and the errors of
    ``check_precision`` and ``apply_activation``.
    """
    if x_BD.dim() != 2 or any(value is not None for value in speculative.values()):
        raise NotImplementedError(NO_SPECULATION)
    check_precision(conv_state, x_BD)
    slots = conv_state_indices[: len(x_BD)].long()
    window_BDW = torch.cat([conv_state[slots].to(x_BD.dtype), x_BD[:, :, None]], -1)
    conv_state[slots] = window_BDW[:, :, 1:].to(conv_state.dtype)
    wide = sum_dtype(x_BD)
    return apply_activation((window_BDW.to(wide) * weight_DW.to(wide)).sum(-1), bias_D, activation).to(x_BD.dtype)


def sum_dtype(x: Tensor) -> torch.dtype:
    """Return the accumulation dtype: float32, or float64 if ``x`` is float64."""
    return torch.promote_types(x.dtype, torch.float32)


def apply_activation(x: Tensor, bias: Tensor | None, activation: str | None) -> Tensor:
    """Return ``silu(x + bias)``; without an ``activation``, ``x + bias``. The ``bias`` may be None.

    Raises ``NotImplementedError`` for an activation other than SiLU.
    """
    if bias is not None:
        x = x + bias.to(x.dtype)
    if activation in (None, ""):
        return x
    if activation not in ("silu", "swish"):
        raise NotImplementedError(
            f"engines on a CPU do not support activation {activation!r} after a hybrid model's convolution: {FIX}"
        )
    return F.silu(x)


def check_precision(states: Tensor, x: Tensor) -> None:
    """Raise ``ValueError`` if the pool's dtype would round the states."""
    if torch.finfo(states.dtype).eps > torch.finfo(x.dtype).eps:
        raise ValueError(
            f"convolution states are stored in {states.dtype}, but the inputs are {x.dtype}: "
            f"set SGLANG_MAMBA_CONV_DTYPE={str(x.dtype).removeprefix('torch.')} before SGLang starts"
        )
