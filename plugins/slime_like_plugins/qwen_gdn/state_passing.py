"""Context parallelism by passing states: every rank computes all heads over its range of the packed stream.

The gated delta rule is linear in its state, ``S_t = A_t S_{t-1} + B_t`` and ``o_t = q_t S_t``. With ``o_t`` the outputs of a
range that starts from a zero state, the outputs from any state ``S`` are ``o_t + (q_t A_t ... A_1) S``. A range consists of
pieces: sequences, and parts of sequences that its borders cut. Each rank runs its pieces from a zero state. If the first piece
continues an earlier rank's sequence, the rank runs that piece a second time, from the identity and with zero values: the outputs
are the rows ``q_t A_t ... A_1``, and the final state is the product ``A``. An all-gather of ``A`` and of the last piece's final
state then gives every rank its initial state. A kernel only has to take an initial state and return the final one. A backend may
have its own rule for the divided stream instead (``GDNBackend.range_rule``). The data that each rank sends per layer does not
grow with the length of the sequences: Hv * K * (K + V) numbers, and the W - 1 last tokens of its range for a convolution of
width W. None of these data are sent if no border between ranks cuts a sequence.

In attention, a rank has other tokens than in its range: two chunks of each sequence (``model.layout.zigzag``). Moving tokens
to the ranges and back causes traffic that does grow with the length. Moving hidden states, before the first projection and after
the second, usually causes less than moving the projected tensors and the output of the rule (in Qwen3-Next, a third as much). If
so, the hidden states are moved, unless sequence parallelism splits them.

Linearity of the recurrence: S. Yang, J. Kautz, A. Hatamizadeh, Gated Delta Networks (https://arxiv.org/abs/2412.06464).

Axes: L local tokens, T tokens of a piece, H query and key heads, Hv value heads, K and V their dimensions, D channels.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from slime_like.train.megatron.model.layers import PackedRows
from slime_like_plugins.qwen_gdn.backend import GDNBackend
from slime_like_plugins.qwen_gdn.mixing import DeltaInputs, MixingHeads, rule_inputs
from slime_like_plugins.qwen_gdn.ranges import Bounds, Range, range_of


class StatePassing:
    """``Mixing`` for any number of heads: each rank computes all of its heads over its range of the stream.

    ``hidden``: number of channels of the layer's input, or 0 if sequence parallelism splits the input. Calls of the instance,
    of ``enter`` and of ``leave`` may be collectives over ``group``: all ranks must make the same calls.
    """

    def __init__(self, backend: GDNBackend, heads: MixingHeads, group: Any, hidden: int = 0) -> None:
        self.backend, self.heads, self.group = backend, heads, group
        num_channels = sum(heads.channels) + 2 * heads.values + heads.channels[2]  # channels into and out of the rule
        self.moves_hidden = 0 < 2 * hidden < num_channels

    def __call__(self, inputs: DeltaInputs, packed: PackedRows) -> Tensor:
        """Return the output [L, HV, V] for this rank's L tokens and all of its heads."""
        local_range = self._range(packed, inputs.qkv.device)
        if not self.moves_hidden:
            stream = local_range.to_stream(torch.cat((inputs.qkv, inputs.beta, inputs.alpha), -1))
            qkv, beta, alpha = stream.split((sum(self.heads.channels), self.heads.values, self.heads.values), -1)
            inputs = replace(inputs, qkv=qkv, beta=beta, alpha=alpha)
        mixed = causal_conv(self.backend, inputs.qkv, inputs.conv_weight, local_range, "silu")
        rule = rule_inputs(mixed, inputs, self.heads)
        out = gated_delta_rule(self.backend, rule.q, rule.k, rule.v, rule.g, rule.beta, local_range)[0]
        return out if self.moves_hidden else local_range.to_rows(out)

    def enter(self, hidden: Tensor, packed: PackedRows) -> Tensor:
        """Return the hidden states of this rank's range if ``moves_hidden``, else ``hidden`` unchanged."""
        return self._range(packed, hidden.device).to_stream(hidden) if self.moves_hidden else hidden

    def leave(self, hidden: Tensor, packed: PackedRows) -> Tensor:
        """Reverse ``enter``."""
        return self._range(packed, hidden.device).to_rows(hidden) if self.moves_hidden else hidden

    def _range(self, packed: PackedRows, device: torch.device) -> Range:
        assert packed.cu_seqlens_q is not None
        return range_of(tuple(packed.cu_seqlens_q.tolist()), self.group, device, self.backend)


def causal_conv(backend: GDNBackend, x_LD: Tensor, weight_DW: Tensor, local_range: Range, activation: str) -> Tensor:
    """Return the convolution [L, D] at the tokens of this rank's range; ``x_LD`` is its input at these tokens.

    Collective over the context parallel ranks if W > 1 and a border between ranks cuts a sequence.
    """
    part, history = local_range.part, weight_DW.shape[1] - 1
    if not part.is_cut or history == 0:
        return _convolved(backend, x_LD, weight_DW, local_range.pieces, activation)
    tails = local_range.gather(x_LD[-history:])
    earlier = tails[: local_range.rank].flatten(0, 1)  # a range shorter than the history is sent whole
    num_earlier = min(history, part.history)
    halo = x_LD.new_zeros(len(part.cu_seqlens) - 1, history, x_LD.shape[1])
    if num_earlier:
        halo[0, history - num_earlier :] = earlier[len(earlier) - num_earlier :]
    out = _convolved(backend, x_LD, weight_DW, local_range.pieces, activation, halo)
    return _KeepInGraph.apply(out, tails)


def gated_delta_rule(
    backend: GDNBackend, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, local_range: Range
) -> Tensor:
    """Return the output [1, L, Hv, V] of the gated delta rule over the entire stream, at the tokens of this rank's range.

    The arguments are q, k [1, L, H, K], v [1, L, Hv, V], g (log of the decay) and beta [1, L, Hv]. Collective over the
    context parallel ranks if a border between ranks cuts a sequence.
    """
    part, columns = local_range.part, (q, k, v, g, beta)
    edges = part.cu_seqlens.tolist()
    if not part.is_cut:
        return _chunk_rule(backend, columns, local_range.pieces)[0]
    if local_range.rule is not None:
        return local_range.rule(*columns)
    last = edges[-2]
    out, state = _chunk_rule(backend, tuple(x[:, last:] for x in columns), local_range.last_piece, final=True)
    if last:  # earlier pieces need no final state
        out = torch.cat(
            (_chunk_rule(backend, tuple(x[:, :last] for x in columns), local_range.all_but_last)[0], out), 1
        )
    assert state is not None
    size = k.shape[-1]
    product = state.new_zeros(*state.shape[:-1], size)
    rows: Tensor | None = None
    if part.chain:
        rows, product = _products(
            backend, tuple(x[:, : edges[1]] for x in columns), local_range.first_piece, state.dtype
        )
    ends = local_range.gather(torch.cat((state, product), -1)[0])  # [cp, Hv, K, V + K]
    out = _KeepInGraph.apply(out, ends)
    if rows is None:
        return out
    initial = ends[part.chain[0], ..., :-size]
    for rank in part.chain[1:]:
        initial = ends[rank, ..., :-size] + ends[rank, ..., -size:] @ initial
    carried = torch.einsum("bthk,hkv->bthv", rows.to(initial.dtype), initial)
    return torch.cat((out[:, : edges[1]] + carried.to(out.dtype), out[:, edges[1] :]), 1)


def _products(
    backend: GDNBackend, columns: tuple[Tensor, ...], bounds: Bounds, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Return the rows ``q_t A_t ... A_1`` [1, T, Hv, K] and the product of all ``A_t`` [1, Hv, K, K] for one piece.

    ``A_t`` is the factor of the state in the recurrence ``S_t = A_t S_{t-1} + B_t``.
    """
    q, k, v, g, beta = columns
    size, heads = k.shape[-1], v.shape[2]
    identity = torch.eye(size, dtype=dtype, device=q.device).expand(1, heads, size, size)
    zero_values = v.new_zeros(*v.shape[:-1], size)
    rows, product = _chunk_rule(backend, (q, k, zero_values, g, beta), bounds, initial=identity, final=True)
    assert product is not None
    return rows, product


def _chunk_rule(
    backend: GDNBackend,
    columns: tuple[Tensor, ...],
    bounds: Bounds,
    initial: Tensor | None = None,
    final: bool = False,
) -> tuple[Tensor, Tensor | None]:
    return backend.chunk_rule(
        *columns,
        cu_seqlens=bounds.device,
        cu_seqlens_cpu=bounds.host,
        initial_state=initial,
        output_final_state=final,
    )


def _convolved(
    backend: GDNBackend, x_LD: Tensor, weight_DW: Tensor, bounds: Bounds, activation: str, halo: Tensor | None = None
) -> Tensor:
    out = backend.causal_conv(
        x_LD[None],
        weight_DW,
        cu_seqlens=bounds.device,
        cu_seqlens_cpu=bounds.host,
        activation=activation,
        halo=halo,
    )
    return out[0]


class _KeepInGraph(torch.autograd.Function):
    """Identity on ``x`` that keeps ``gathered`` in the graph: every rank has to join the collective in the gather's backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, gathered: Tensor) -> Tensor:
        ctx.shape, ctx.options = gathered.shape, {"dtype": gathered.dtype, "device": gathered.device}
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor]:
        return grads[0], torch.zeros(ctx.shape, **ctx.options)
