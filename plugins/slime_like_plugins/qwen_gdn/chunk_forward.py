"""The gated delta rule chunk by chunk, forward: see ``backend.GDNBackend.chunk_rule`` for the recurrence.

Within a chunk of C tokens, with gamma the running sum of g, L the strict lower part of beta_i exp(gamma_i - gamma_j) k_i.k_j
and S the state before it (the WY form of Yang et al., "Parallelizing Linear Transformers with the Delta Rule", 2024)::

    v' = (I + L)^-1 beta (v - exp(gamma) k S)
    o  = exp(gamma) q S + tril(exp(gamma_i - gamma_j) q_i.k_j) v'
    S' = exp(gamma_C) S + k^T exp(gamma_C - gamma) v'

One solve for v' takes the place of the two (u and w) of the usual form, which halves what is kept for backward.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import ClassVar

import torch
from torch import Tensor

from slime_like_plugins.qwen_gdn.backend import NORM_EPS
from slime_like_plugins.qwen_gdn.packing import ChunkOrder
from slime_like_plugins.qwen_gdn.triangular import unit_lower_inverse

MATRICES = 64  # (chunk, head) pairs per block


@dataclass(frozen=True, slots=True)
class Inputs:
    """What a call is given, cut into M chunks, in the dtype it is computed in."""

    keys: Tensor  # [M, H, 2C, K] keys of length 1, below them queries of length scale
    rstd: Tensor  # [M, H, 2C] what made their length 1
    v: Tensor  # [M, HV, C, V]
    beta: Tensor  # [M, HV, C]
    decay: Tensor  # [M, HV, C] exp(gamma)
    to_end: Tensor  # [M, HV, C] exp(gamma_C - gamma)
    gamma: Tensor  # [M, HV, C]

    NUM_TENSORS: ClassVar[int] = 7

    def tensors(self) -> tuple[Tensor, ...]:
        """All of them, in order."""
        return tuple(getattr(self, item.name) for item in fields(self))

    @property
    def groups(self) -> int:
        """Value heads per key head."""
        return self.v.shape[1] // self.keys.shape[1]


@dataclass(frozen=True, slots=True)
class Block:
    """What backward needs of a block of m chunks."""

    gram: Tensor  # [m, H, 2C, C] keys and queries against keys
    pair_decay: Tensor  # [m, HV, C, C] exp(gamma_i - gamma_j) where i >= j, else 0
    solve: Tensor  # [m, HV, C, C] (I + L)^-1
    delta: Tensor  # [m, HV, C, V] v - exp(gamma) k S
    written: Tensor  # [m, HV, C, V] v'
    states: Tensor  # [m, HV, K, V] S before each chunk

    NUM_TENSORS: ClassVar[int] = 6

    def tensors(self) -> tuple[Tensor, ...]:
        """All of them, in order."""
        return tuple(getattr(self, item.name) for item in fields(self))


@dataclass(frozen=True, slots=True)
class Result:
    """What forward gives."""

    out: Tensor  # [M, HV, C, V]
    final: Tensor  # [N, HV, K, V] in the order's order of sequences
    blocks: tuple[Block, ...]  # empty unless they were to be kept


def prepare(rows: tuple[Tensor, Tensor, Tensor, Tensor, Tensor], order: ChunkOrder, scale: float) -> Inputs:
    """Cut q, k [T, H, K], v [T, HV, V], g and beta [T, HV] into chunks; gaps neither decay nor write."""
    q, k, v, g, beta = rows
    dtype = torch.float64 if q.dtype == torch.float64 else torch.float32
    count, chunk = order.num_chunks, order.chunk
    keys = torch.empty(count, k.shape[1], 2 * chunk, k.shape[2], dtype=dtype, device=k.device)
    keys[:, :, :chunk] = order.pack(k)
    keys[:, :, chunk:] = order.pack(q)
    rstd = torch.linalg.vecdot(keys, keys).add_(NORM_EPS).rsqrt_()
    keys *= rstd.unsqueeze(-1)
    keys[:, :, chunk:] *= scale
    gamma = order.pack(g.unsqueeze(-1)).squeeze(-1).to(dtype).cumsum(-1)
    return Inputs(
        keys=keys,
        rstd=rstd,
        v=order.pack(v).to(dtype).contiguous(),
        beta=order.pack(beta.unsqueeze(-1)).squeeze(-1).to(dtype).contiguous(),
        decay=gamma.exp(),
        to_end=(gamma[..., -1:] - gamma).exp_(),
        gamma=gamma,
    )


def forward(x: Inputs, state: Tensor, order: ChunkOrder, *, keep: bool) -> Result:
    """``state`` [N, HV, K, V]: what each sequence starts from, in the order's order; ``keep`` for a later backward."""
    out = torch.empty_like(x.v)
    blocks: list[Block] = []
    finished: list[Tensor] = []
    for steps in order.blocks(x.v.shape[1], MATRICES):
        within = slice(order.starts[steps.start], order.starts[steps.stop])
        gram, pair_decay, solve = _pairs(x, within)
        block = Block(
            gram=gram,
            pair_decay=pair_decay,
            solve=solve,
            delta=torch.empty_like(x.v[within]),
            written=torch.empty_like(x.v[within]),
            states=x.v.new_empty(len(gram), *state.shape[1:]),
        )
        scores = (grouped(gram, x)[..., order.chunk :, :] * grouped(pair_decay, x)).view_as(pair_decay)
        for step in steps:
            count = order.counts[step]
            finished.append(state[count:])
            state = _step(x, block, scores, state[:count], (order.starts[step], within.start), out)
        if keep:
            blocks.append(block)
    final = torch.cat([state, *reversed(finished)])
    return Result(out, final, tuple(blocks))


def grouped(part: Tensor, x: Inputs) -> Tensor:
    """[m, H or HV, ...] -> [m, H, 1 or HV / H, ...]: key heads beside the value heads that read them."""
    heads = x.keys.shape[1]
    return part.view(part.shape[0], heads, part.shape[1] // heads, *part.shape[2:])


def per_value_head(keys: Tensor, groups: int) -> Tensor:
    """[n, H, R, K] -> [n * HV, R, K]."""
    if groups > 1:
        keys = keys.unsqueeze(2).expand(-1, -1, groups, -1, -1)
    return keys.reshape(-1, *keys.shape[-2:])


def _pairs(x: Inputs, within: slice) -> tuple[Tensor, Tensor, Tensor]:
    """``gram``, ``pair_decay`` and ``solve`` of the chunks ``within``."""
    keys, gamma = x.keys[within], x.gamma[within]
    chunk = gamma.shape[-1]
    gram = torch.matmul(keys, keys[:, :, :chunk].mT)
    pair_decay = gamma.unsqueeze(-1) - gamma.unsqueeze(-2)
    future = torch.ones(chunk, chunk, dtype=torch.bool, device=gamma.device).triu_(1)
    # Masked before exp: the upper half grows with the decay and overflows.
    pair_decay.masked_fill_(future, float("-inf")).exp_()
    lower = grouped(gram, x)[..., :chunk, :] * grouped(pair_decay, x)
    lower *= grouped(x.beta[within], x).unsqueeze(-1)
    return gram, pair_decay, unit_lower_inverse(lower.view(-1, chunk, chunk)).view_as(pair_decay)


def _step(x: Inputs, block: Block, scores: Tensor, state: Tensor, first: tuple[int, int], out: Tensor) -> Tensor:
    """One chunk of each of n sequences: writes ``block`` and ``out``, returns the next state [n, HV, K, V].

    ``first``: number of the step's first chunk, and of the block's.
    """
    count, heads = state.shape[:2]
    chunk = scores.shape[-1]
    here = slice(first[0], first[0] + count)
    mine = slice(first[0] - first[1], first[0] - first[1] + count)
    block.states[mine] = state
    keys = per_value_head(x.keys[here], x.groups)
    read = torch.bmm(keys, state.reshape(-1, *state.shape[2:])).view(count, heads, 2, chunk, -1)
    read *= x.decay[here].unsqueeze(2).unsqueeze(-1)
    delta = torch.sub(x.v[here], read[:, :, 0], out=block.delta[mine])
    target = (delta * x.beta[here].unsqueeze(-1)).flatten(0, 1)
    written = torch.bmm(block.solve[mine].flatten(0, 1), target, out=block.written[mine].flatten(0, 1))
    earlier = read[:, :, 1].flatten(0, 1)
    torch.baddbmm(earlier, scores[mine].flatten(0, 1), written, out=out[here].flatten(0, 1))
    written = written * x.to_end[here].flatten(0, 1).unsqueeze(-1)
    kept = (state * x.decay[here][..., -1, None, None]).flatten(0, 1)
    return torch.baddbmm(kept, keys[:, :chunk].mT, written).view_as(state)
