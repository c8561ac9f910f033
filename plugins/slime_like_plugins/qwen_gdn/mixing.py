"""Computation of a Gated DeltaNet layer between its two projections, and the interface for context parallelism.

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
    """Heads of one rank: H key heads of K channels, HV value heads of V, HV a multiple of H."""

    keys: int
    values: int
    key_dim: int
    value_dim: int

    @property
    def channels(self) -> tuple[int, int, int]:
        """Channels of query, key and value."""
        return self.keys * self.key_dim, self.keys * self.key_dim, self.values * self.value_dim

    def shared_by(self, ranks: int) -> MixingHeads:
        """Return the heads of one of ``ranks`` that share these."""
        return MixingHeads(self.keys // ranks, self.values // ranks, self.key_dim, self.value_dim)


@dataclass(frozen=True, slots=True)
class DeltaInputs:
    """Inputs of T tokens in the order of their sequences, or of the L tokens of a context parallel rank.

    ``qkv`` [T, C], ``beta`` and ``alpha`` [T, HV] as the projection leaves them; the others are parameters.
    """

    qkv: Tensor
    beta: Tensor
    alpha: Tensor
    conv_weight: Tensor  # [C, W]
    A_log: Tensor  # F32 [HV]
    dt_bias: Tensor  # F32 [HV]


@dataclass(frozen=True, slots=True)
class RuleInputs:
    """Arguments of the gated delta rule: q, k [1, T, H, K], v [1, T, HV, V], g and beta at least F32 [1, T, HV]."""

    q: Tensor
    k: Tensor
    v: Tensor
    g: Tensor
    beta: Tensor


class Mixing(Protocol):
    """From the projected tokens of one rank to what their value heads read out; one instance per layer.

    Without context parallelism, and with it in the head-wise mode, this is ``HeadWise``.
    """

    def __call__(self, inputs: DeltaInputs, packed: PackedRows) -> Tensor:
        """``inputs`` of this rank's L tokens and all of its heads -> [L, HV, V]."""
        ...

    def enter(self, hidden: Tensor, packed: PackedRows) -> Tensor:
        """[L, 1, hidden] in attention's layout -> those of the tokens that this rank projects and mixes."""
        ...

    def leave(self, hidden: Tensor, packed: PackedRows) -> Tensor:
        """The inverse of ``enter``."""
        ...


def decay_and_strength(inputs: DeltaInputs) -> tuple[Tensor, Tensor]:
    """Log decay ``g`` <= 0 and write strength ``beta`` of each token and value head [T, HV], in float32 at least."""
    alpha, beta = at_least_f32(inputs.alpha), at_least_f32(inputs.beta)
    return -inputs.A_log.exp() * F.softplus(alpha + inputs.dt_bias), beta.sigmoid()


def at_least_f32(x: Tensor) -> Tensor:
    """Convert to float32, unless it is float64."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def rule_inputs(convolved_TC: Tensor, inputs: DeltaInputs, heads: MixingHeads) -> RuleInputs:
    """Split convolved channels of T tokens by head."""
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
    """Whole sequences on one rank: T tokens and H heads -> [T, HV, V]."""
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
