"""Gated delta rule with SGLang's pool of states: prefill of packed sequences, and one token per request.

    S_t = exp(g_t) S_{t-1} + beta_t (v_t - exp(g_t) S_{t-1} k_t) k_t^T        o_t = S_t q_t / sqrt(K)

(Yang, Kautz, Hatamizadeh, Gated Delta Networks, 2024, equation 10.) Queries and keys are normalised first.

Axes: T tokens of the packed batch, B requests, H query and key heads, HV value heads (a multiple of H), K and V head
dimensions.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from slime_like_plugins.qwen_gdn.backend import NORM_EPS
from slime_like_plugins.qwen_gdn.torch_chunk import TorchGDN
from slime_like_plugins.sglang_cpu.hybrid.layers import NO_SPECULATION

MAX_RECURRENT = 8  # maximum prompt length for which token by token is faster than chunks
STATE_CHUNK = 64  # tokens between the states that SGLang's prefix cache keeps (``mamba_chunk_size``)
CHUNKED = TorchGDN()  # the trainer's backend on a CPU


def fused_gdn_gating(A_log: Tensor, a: Tensor, b: Tensor, dt_bias: Tensor) -> tuple[Tensor, Tensor]:
    """Return log decay and write strength, both [1, T, HV] in float32, from the projections ``a`` and ``b`` [T, HV].

    This function replaces ``sglang.kernels.ops.attention.linear.fused_gdn_gating.fused_gdn_gating``.
    """
    g = -A_log.float().exp() * F.softplus(a.float() + dt_bias.float())
    return g[None], b.float().sigmoid()[None]


def extend(  # noqa: PLR0913  (a signature of SGLang)
    kernel: object,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    *,
    ssm_states: Tensor,
    cache_indices: Tensor,
    query_start_loc: Tensor,
    inplace_update: bool = True,
    track_state: Tensor | None = None,
    track_chunk_idx: Tensor | None = None,
    **_: Any,
) -> tuple[Tensor, None, None]:
    """Return (output [1, T, HV, V], None, None) for packed sequences with bounds ``query_start_loc`` [B + 1].

    The arguments are q, k [1, T, H, K], v [1, T, HV, V], g and beta [1, T, HV]. ``ssm_states`` is the pool; its rows
    ``cache_indices`` are read, and written unless ``inplace_update`` is false. Row b of ``track_state`` [B, HV, V, K]
    gets the state of request b after its first ``64 * track_chunk_idx[b]`` tokens, if there are any. This function replaces
    ``sglang.srt.layers.attention.linear.kernels.gdn_triton.TritonGDNKernel.extend``.
    """
    packed = (q[0], k[0], v[0], g[0], beta[0])
    lengths = query_start_loc.diff().tolist()
    slots = cache_indices[: len(lengths)].long()
    initial = ssm_states[slots].float()
    if track_state is None or track_chunk_idx is None:
        out, final = packed_rule(packed, lengths, initial)
    else:
        splits = [max(0, chunk) * STATE_CHUNK for chunk in track_chunk_idx.tolist()]
        out, final = split_rule(packed, lengths, splits, initial, track_state)
    if inplace_update:
        ssm_states[slots] = final.to(ssm_states.dtype)
    return out[None], None, None


def split_rule(
    packed: tuple[Tensor, ...], lengths: list[int], splits: list[int], initial: Tensor, states: Tensor
) -> tuple[Tensor, Tensor]:
    """Apply ``packed_rule`` to the first ``splits[b]`` tokens of each request b, then to its other tokens.

    Row b of ``states`` gets the state of request b after the first part, unless ``splits[b]`` is 0.
    """
    starts = [0, *torch.tensor(lengths).cumsum(0).tolist()]
    middles = [start + split for start, split in zip(starts, splits, strict=False)]
    out, final = torch.zeros_like(packed[2]), initial.clone()
    for firsts, ends in ((starts, middles), (middles, starts[1:])):
        requests = [index for index, first in enumerate(firsts[: len(lengths)]) if first < ends[index]]
        if not requests:
            continue
        rows = torch.cat([torch.arange(firsts[index], ends[index]) for index in requests])
        counts = [ends[index] - firsts[index] for index in requests]
        out[rows], final[requests] = packed_rule(tuple(t[rows] for t in packed), counts, final[requests])
        if ends is middles:
            states[requests] = final[requests].to(states.dtype)
    return out, final


def packed_rule(packed: tuple[Tensor, ...], lengths: list[int], initial: Tensor) -> tuple[Tensor, Tensor]:
    """Apply the rule to packed q, k, v, g, beta and initial states [B, HV, V, K].

    Return the output [T, HV, V] and the final states.
    """
    q, k, v, g, beta = packed
    if max(lengths) <= MAX_RECURRENT:
        return recurrent_rule(q, k, v, g, beta, lengths, initial)
    bounds = torch.tensor([0, *lengths]).cumsum(0)
    out, final = CHUNKED.chunk_rule(
        *(t[None] for t in packed),
        cu_seqlens=bounds,
        cu_seqlens_cpu=bounds,
        initial_state=initial.mT.contiguous(),
        output_final_state=True,
    )
    assert final is not None
    return out[0], final.mT


def fused_sigmoid_gating_delta_rule_update(  # noqa: PLR0913  (a signature of SGLang)
    *,
    A_log: Tensor,
    dt_bias: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    a: Tensor,
    b: Tensor,
    initial_state_source: Tensor,
    initial_state_indices: Tensor,
    softplus_beta: float = 1.0,
    disable_state_update: bool = False,
    **_: Any,
) -> Tensor:
    """Return the output [1, B, HV, V] of one token per request, and update the states.

    The arguments are q, k [1, B, H, K], v [1, B, HV, V], and a, b [B, HV]. This function replaces
    ``sglang.kernels.ops.attention.linear.fused_sigmoid_gating_recurrent.fused_sigmoid_gating_delta_rule_update``. Raises
    ``NotImplementedError`` for speculative decoding, or a ``softplus_beta`` other than 1.
    """
    if disable_state_update or softplus_beta != 1.0:
        raise NotImplementedError(NO_SPECULATION)
    g, beta = fused_gdn_gating(A_log, a, b, dt_bias)
    slots = initial_state_indices[: v.shape[1]].long()
    heads = v.shape[2]
    state = initial_state_source[slots].float()
    out = token_step(state, normed(q[0], heads), normed(k[0], heads), v[0].float(), g[0], beta[0])
    initial_state_source[slots] = state.to(initial_state_source.dtype)
    return out[None].to(v.dtype)


def normed(x: Tensor, heads: int) -> Tensor:
    """Scale vectors [T, H, K] to norm 1 in float32; repeat each head for the value heads that share it: [T, heads, K]."""
    x = x.float()
    x = x * torch.rsqrt(x.square().sum(-1, keepdim=True) + NORM_EPS)
    return x if x.shape[1] == heads else x.repeat_interleave(heads // x.shape[1], 1)


def recurrent_rule(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, lengths: list[int], state: Tensor
) -> tuple[Tensor, Tensor]:
    """Apply the rule token by token to all requests together. Return the output [T, HV, V] and the final states [B, HV, V, K].

    The function itself sorts the requests longest first, so that those with tokens left are a prefix of the batch.
    """
    heads = v.shape[1]
    order = sorted(range(len(lengths)), key=lambda request: -lengths[request])
    ends = torch.tensor(lengths).cumsum(0)
    starts_B = (ends - torch.tensor(lengths))[order]
    state, out = state[order], torch.zeros_like(v)
    q, k = normed(q, heads), normed(k, heads)
    num_active = len(order)
    for step in range(lengths[order[0]] if order else 0):
        while lengths[order[num_active - 1]] <= step:
            num_active -= 1
        rows = starts_B[:num_active] + step
        out[rows] = token_step(state[:num_active], q[rows], k[rows], v[rows].float(), g[rows], beta[rows]).to(v.dtype)
    original = torch.empty_like(state)
    original[order] = state
    return out, original


def token_step(state: Tensor, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> Tensor:
    """Return the output [B, HV, V] of one token per request; update ``state`` [B, HV, V, K] in place.

    The arguments are normalised q and k [B, HV, K], v [B, HV, V], and g and beta [B, HV].
    """
    state.mul_(g.exp()[..., None, None])
    delta = (v - (state @ k[..., None])[..., 0]) * beta[..., None]
    state.add_(delta[..., :, None] * k[..., None, :])
    return (state @ q[..., None])[..., 0] * k.shape[-1] ** -0.5
