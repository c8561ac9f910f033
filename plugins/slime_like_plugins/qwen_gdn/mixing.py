"""Gated DeltaNet computation between a layer's two projections, and its interface for context parallelism.

``g = -exp(A_log) * softplus(alpha + dt_bias)``, ``beta = sigmoid(beta)``, a short causal convolution over query, key and
value channels, then the gated delta rule (https://arxiv.org/abs/2412.06464).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from slime_like.train.megatron.model.layers import PackedRows
from slime_like_plugins.qwen_gdn.backend import GDNBackend


@dataclass(frozen=True, slots=True)
class MixingHeads:
    """Head counts and sizes of one rank: H key heads with K channels, HV value heads with V channels, HV a multiple of H."""

    keys: int
    values: int
    key_dim: int
    value_dim: int

    @property
    def channels(self) -> tuple[int, int, int]:
        """Number of query channels, of key channels, and of value channels."""
        return self.keys * self.key_dim, self.keys * self.key_dim, self.values * self.value_dim

    def shared_by(self, ranks: int) -> MixingHeads:
        """Return the heads per rank when these heads are split over ``ranks`` ranks; ``ranks`` must divide both head counts."""
        return MixingHeads(self.keys // ranks, self.values // ranks, self.key_dim, self.value_dim)


@dataclass(frozen=True, slots=True)
class DeltaInputs:
    """Inputs for T tokens in sequence order, or for the L tokens of one context parallel rank.

    ``qkv`` [T, C], ``beta`` and ``alpha`` [T, HV] come from the input projection; the other fields are parameters.
    """

    qkv: Tensor
    beta: Tensor
    alpha: Tensor
    conv_weight: Tensor  # [C, W]
    A_log: Tensor  # F32 [HV]
    dt_bias: Tensor  # F32 [HV]


@dataclass(frozen=True, slots=True)
class RuleInputs:
    """Arguments of the gated delta rule: q, k [1, T, H, K], v [1, T, HV, V], and float32 or float64 g, beta [1, T, HV]."""

    q: Tensor
    k: Tensor
    v: Tensor
    g: Tensor
    beta: Tensor


class Mixing(Protocol):
    """Computation between a layer's projections for the tokens of one rank. One instance per layer.

    ``HeadExchange`` implements it without context parallelism and for ``cp_mode=head``, ``StatePassing`` for
    ``cp_mode=state``. Methods may be collectives over the context parallel ranks.
    """

    def __call__(self, inputs: DeltaInputs, packed: PackedRows) -> Tensor:
        """Return the output [L, HV, V] for this rank's L tokens and all of its heads."""
        ...

    def enter(self, hidden: Tensor, packed: PackedRows) -> Tensor:
        """Return the hidden states [L, 1, hidden] of the tokens for which this rank computes the projections.

        ``hidden`` [L, 1, hidden] has those of the tokens that the rank has in attention (``model.layout.zigzag``). With
        sequence parallelism, both have only L / tp of these tokens; the projections gather the others.
        """
        ...

    def leave(self, hidden: Tensor, packed: PackedRows) -> Tensor:
        """Reverse ``enter``."""
        ...


def decay_and_strength(inputs: DeltaInputs) -> tuple[Tensor, Tensor]:
    """Return the log decay ``g`` <= 0 and the write strength ``beta``, both [T, HV], in float32 or float64."""
    alpha, beta = at_least_f32(inputs.alpha), at_least_f32(inputs.beta)
    return -inputs.A_log.exp() * F.softplus(alpha + inputs.dt_bias), beta.sigmoid()


def at_least_f32(x: Tensor) -> Tensor:
    """Return ``x`` in float32, or unchanged if it is float64."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def rule_inputs(convolved_TC: Tensor, inputs: DeltaInputs, heads: MixingHeads) -> RuleInputs:
    """Return the arguments of the gated delta rule for T tokens, from their convolved channels [T, C]."""
    q, k, v = convolved_TC.split(heads.channels, -1)
    g, beta = decay_and_strength(inputs)
    return RuleInputs(
        q.unflatten(-1, (heads.keys, heads.key_dim))[None],
        k.unflatten(-1, (heads.keys, heads.key_dim))[None],
        v.unflatten(-1, (heads.values, heads.value_dim))[None],
        g[None],
        beta[None],
    )


def delta_rule(
    backend: GDNBackend, inputs: DeltaInputs, heads: MixingHeads, cu_seqlens: Tensor, cu_seqlens_cpu: Tensor
) -> Tensor:
    """Return the output [T, HV, V] for T tokens of complete sequences: convolution, then the gated delta rule."""
    convolved = backend.causal_conv(
        inputs.qkv[None],
        inputs.conv_weight,
        cu_seqlens=cu_seqlens,
        cu_seqlens_cpu=cu_seqlens_cpu,
        activation="silu",
    )
    rule = rule_inputs(convolved[0], inputs, heads)
    out, _ = backend.chunk_rule(
        rule.q, rule.k, rule.v, rule.g, rule.beta, cu_seqlens=cu_seqlens, cu_seqlens_cpu=cu_seqlens_cpu
    )
    return out[0]
