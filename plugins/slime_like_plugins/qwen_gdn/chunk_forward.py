"""Chunked forward of the gated delta rule; ``backend.GDNBackend.chunk_rule`` states the recurrence.

Within a chunk of C tokens, with gamma the running sum of g, L the strict lower part of beta_i exp(gamma_i - gamma_j) k_i.k_j
and S the state before the chunk (the WY form of Yang et al., "Parallelizing Linear Transformers with the Delta Rule", 2024)::

    v' = (I + L)^-1 beta (v - exp(gamma) k S)
    o  = exp(gamma) q S + tril(exp(gamma_i - gamma_j) q_i.k_j) v'
    S' = exp(gamma_C) S + k^T exp(gamma_C - gamma) v'

One solve for v' replaces the two solves (u and w) of the usual form, so that neither u nor w is saved for backward.
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
class ChunkInputs:
    """Inputs of a call, split into M chunks and converted to float32, or to float64 for a float64 call."""

    keys: Tensor  # [M, H, 2C, K] keys of norm 1, below them queries of norm ``scale``
    rstd: Tensor  # [M, H, 2C] factor that normalised keys and queries
    v: Tensor  # [M, HV, C, V]
    beta: Tensor  # [M, HV, C]
    decay: Tensor  # [M, HV, C] exp(gamma)
    to_end: Tensor  # [M, HV, C] exp(gamma_C - gamma)
    gamma: Tensor  # [M, HV, C]

    NUM_TENSORS: ClassVar[int] = 7

    def tensors(self) -> tuple[Tensor, ...]:
        """Return all fields in order."""
        return tuple(getattr(self, item.name) for item in fields(self))


@dataclass(frozen=True, slots=True)
class ChunkBlock:
    """Tensors that backward needs for a block of m chunks."""

    gram: Tensor  # [m, H, 2C, C] dot products of keys and queries with keys
    pair_decay: Tensor  # [m, HV, C, C] exp(gamma_i - gamma_j) where i >= j, else 0
    solve: Tensor  # [m, HV, C, C] (I + L)^-1
    delta: Tensor  # [m, HV, C, V] v - exp(gamma) k S
    new_values: Tensor  # [m, HV, C, V] v'
    states: Tensor  # [m, HV, K, V] S before each chunk

    NUM_TENSORS: ClassVar[int] = 6

    def tensors(self) -> tuple[Tensor, ...]:
        """Return all fields in order."""
        return tuple(getattr(self, item.name) for item in fields(self))


@dataclass(frozen=True, slots=True)
class Result:
    """Results of forward."""

    out: Tensor  # [M, HV, C, V]
    final: Tensor  # [N, HV, K, V] in the order of ``ChunkOrder.sequences``
    blocks: tuple[ChunkBlock, ...]  # empty unless ``keep``


def prepare(rows: tuple[Tensor, Tensor, Tensor, Tensor, Tensor], order: ChunkOrder, scale: float) -> ChunkInputs:
    """Split q, k [T, H, K], v [T, HV, V], g and beta [T, HV] into chunks.

    Keys are normalised to length 1, queries to length ``scale``; g is summed up within each chunk. Positions without a row
    (``ChunkOrder.gaps``) neither decay the state nor write to it.
    """
    q, k, v, g, beta = rows
    dtype = torch.float64 if q.dtype == torch.float64 else torch.float32
    num_chunks, chunk = order.num_chunks, order.chunk
    keys = torch.empty(num_chunks, k.shape[1], 2 * chunk, k.shape[2], dtype=dtype, device=k.device)
    keys[:, :, :chunk] = order.pack(k)
    keys[:, :, chunk:] = order.pack(q)
    rstd = torch.linalg.vecdot(keys, keys).add_(NORM_EPS).rsqrt_()
    keys *= rstd.unsqueeze(-1)
    keys[:, :, chunk:] *= scale
    gamma = order.pack(g.unsqueeze(-1)).squeeze(-1).to(dtype).cumsum(-1)
    return ChunkInputs(
        keys=keys,
        rstd=rstd,
        v=order.pack(v).to(dtype).contiguous(),
        beta=order.pack(beta.unsqueeze(-1)).squeeze(-1).to(dtype).contiguous(),
        decay=gamma.exp(),
        to_end=(gamma[..., -1:] - gamma).exp_(),
        gamma=gamma,
    )


def forward(x: ChunkInputs, state: Tensor, order: ChunkOrder, *, keep: bool) -> Result:
    """Run the rule from the initial states ``state`` [N, HV, K, V], which are in the order of ``order.sequences``.

    If ``keep``, the result contains the tensors that backward needs.
    """
    out, state = torch.empty_like(x.v), state.clone()
    blocks: list[ChunkBlock] = []
    for steps in order.blocks(x.v.shape[1], MATRICES):
        chunks = order.chunks_of(steps)
        gram, pair_decay, solve = _pairs(x, chunks)
        block = ChunkBlock(
            gram=gram,
            pair_decay=pair_decay,
            solve=solve,
            delta=torch.empty_like(x.v[chunks]),
            new_values=torch.empty_like(x.v[chunks]),
            states=x.v.new_empty(len(gram), *state.shape[1:]),
        )
        _scan(x, block, state, steps, order)
        queries = scaled(x.keys[chunks, :, order.chunk :], x.decay[chunks])
        block_out = out[chunks].flatten(0, 1)
        torch.bmm(queries, block.states.flatten(0, 1), out=block_out)
        block_out.baddbmm_(masked_scores(x, block), block.new_values.flatten(0, 1))
        if keep:
            blocks.append(block)
    return Result(out, state, tuple(blocks))


def grouped(part: Tensor, x: ChunkInputs) -> Tensor:
    """Return ``part`` [m, H or HV, ...] as [m, H, 1 or HV / H, ...], to broadcast key heads over their value heads."""
    heads = x.keys.shape[1]
    return part.view(part.shape[0], heads, part.shape[1] // heads, *part.shape[2:])


def scaled(keys: Tensor, factor: Tensor) -> Tensor:
    """Return ``keys`` [m, H, C, K], repeated for each value head, times ``factor`` [m, HV, C]: [m * HV, C, K]."""
    m, heads, chunk, size = keys.shape
    factor = factor.view(m, heads, -1, chunk, 1)
    return (keys.unsqueeze(2) * factor).view(-1, chunk, size)


def masked_scores(x: ChunkInputs, block: ChunkBlock) -> Tensor:
    """Return the decayed dot products of queries and keys [m * HV, C, C], 0 where the key is later than the query."""
    chunk = block.solve.shape[-1]
    return (grouped(block.gram, x)[..., chunk:, :] * grouped(block.pair_decay, x)).view(-1, chunk, chunk)


def _pairs(x: ChunkInputs, chunks: slice) -> tuple[Tensor, Tensor, Tensor]:
    """Return the fields ``gram``, ``pair_decay`` and ``solve`` of ``ChunkBlock`` for ``chunks``."""
    keys, gamma = x.keys[chunks], x.gamma[chunks]
    chunk = gamma.shape[-1]
    gram = torch.matmul(keys, keys[:, :, :chunk].mT)
    pair_decay = gamma.unsqueeze(-1) - gamma.unsqueeze(-2)
    future = torch.ones(chunk, chunk, dtype=torch.bool, device=gamma.device).triu_(1)
    # Mask before exp: above the diagonal the exponents are positive, and exp would overflow.
    pair_decay.masked_fill_(future, float("-inf")).exp_()
    lower = grouped(gram, x)[..., :chunk, :] * grouped(pair_decay, x)
    lower *= grouped(x.beta[chunks], x).unsqueeze(-1)
    return gram, pair_decay, unit_lower_inverse(lower.view(-1, chunk, chunk)).view_as(pair_decay)


def _scan(x: ChunkInputs, block: ChunkBlock, state: Tensor, steps: range, order: ChunkOrder) -> None:
    """Run the recurrence over a block: fill its ``delta``, ``new_values`` and ``states``; update ``state`` [N, HV, K, V]."""
    chunks = order.chunks_of(steps)
    heads = state.shape[1]
    keys = x.keys[chunks, :, : order.chunk]
    sizes = [order.counts[step] * heads for step in steps]
    # Operations that do not read the state run once for the entire block, so that each step has few and small operations.
    reads = scaled(keys, x.decay[chunks]).split(sizes)
    writes = scaled(keys, x.to_end[chunks]).mT.split(sizes)
    solves = (block.solve * x.beta[chunks].unsqueeze(-2)).flatten(0, 1).split(sizes)
    ends = x.decay[chunks, :, -1].reshape(-1, 1, 1).split(sizes)
    values, states = x.v[chunks].flatten(0, 1).split(sizes), block.states.flatten(0, 1).split(sizes)
    deltas, new_values = block.delta.flatten(0, 1).split(sizes), block.new_values.flatten(0, 1).split(sizes)
    flat = state.flatten(0, 1)
    states[0].copy_(flat[: sizes[0]])
    for i, size in enumerate(sizes):
        current, next_size = states[i], sizes[i + 1] if i + 1 < len(sizes) else 0
        torch.baddbmm(values[i], reads[i], current, alpha=-1, out=deltas[i])
        torch.bmm(solves[i], deltas[i], out=new_values[i])
        next_state = states[i + 1] if next_size == size else flat[:size]  # some sequences, or the block, end here
        torch.mul(current, ends[i], out=next_state).baddbmm_(writes[i], new_values[i])
        if 0 < next_size < size:
            states[i + 1].copy_(flat[:next_size])
