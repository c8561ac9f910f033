"""Backward of ``chunk_forward``, by hand: autograd would keep every intermediate of every chunk.

With dS' the gradient of the state after a chunk and the names of ``chunk_forward``::

    dv' = P^T do + exp(gamma_C - gamma) k dS'       dy = (I + L)^-T dv'       dv = beta dy
    dS  = exp(gamma_C) dS' + k^T (-exp(gamma) dv) + q^T (exp(gamma) do)
    dL  = -dy v'^T                                  dP = do v'^T

where P are the masked, decayed scores q k^T. The rest are products of these with what forward kept.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from slime_like_plugins.qwen_gdn.chunk_forward import MATRICES, ChunkBlock, ChunkInputs, grouped, masked_scores, scaled
from slime_like_plugins.qwen_gdn.packing import ChunkOrder


@dataclass(frozen=True, slots=True)
class Gradients:
    """Gradients of the chunks' inputs."""

    keys: Tensor  # [M, H, 2C, K] of the keys of length 1 and the scaled queries
    v: Tensor  # [M, HV, C, V]
    beta: Tensor  # [M, HV, C]
    gamma: Tensor  # [M, HV, C]
    state: Tensor  # [N, HV, K, V] of the initial states


@dataclass(frozen=True, slots=True)
class _Scan:
    """Results of a block's reverse recurrence."""

    dy: Tensor  # [m, HV, C, V]
    drive: Tensor  # [m, HV, 2C, V] -exp(gamma) dv, below it exp(gamma) do
    dstates: Tensor  # [m, HV, K, V] gradient of the state after each chunk


def backward(
    x: ChunkInputs, blocks: tuple[ChunkBlock, ...], dout: Tensor, dfinal: Tensor, order: ChunkOrder
) -> Gradients:
    """``dout`` [M, HV, C, V] and ``dfinal`` [N, HV, K, V], the gradients of the output and of the final states."""
    grads = Gradients(
        keys=torch.empty_like(x.keys),
        v=torch.empty_like(x.v),
        beta=torch.empty_like(x.beta),
        gamma=torch.empty_like(x.gamma),
        state=dfinal.clone(),
    )
    runs = list(order.blocks(x.v.shape[1], MATRICES))
    for steps, block in zip(reversed(runs), reversed(blocks), strict=True):
        within = order.within(steps)
        scan = _walk(x, block, dout[within], grads.state, steps, order)
        _gradients(x, block, scan, dout[within], grads, within)
    return grads


def project(keys: Tensor, dkeys: Tensor, rstd: Tensor, scale: float) -> Tensor:
    """Gradient through the normalisation; ``dkeys`` [M, H, 2C, K] is overwritten and returned."""
    chunk = keys.shape[2] // 2
    dkeys[:, :, chunk:] *= scale
    along = torch.linalg.vecdot(dkeys, keys)
    along[:, :, chunk:] /= scale * scale  # both factors hold queries of length scale
    dkeys -= keys * along.unsqueeze(-1)
    dkeys *= rstd.unsqueeze(-1)
    return dkeys


def _walk(x: ChunkInputs, block: ChunkBlock, dout: Tensor, dstate: Tensor, steps: range, order: ChunkOrder) -> _Scan:
    """The recurrence of dS through a block; ``dstate`` [N, HV, K, V] goes from the block's end to its start."""
    m, heads, chunk, size = dout.shape
    within = order.within(steps)
    decay, write_back = x.decay[within], (x.beta[within] * x.decay[within]).neg_()
    keys, queries = x.keys[within, :, :chunk], x.keys[within, :, chunk:]
    drive = dout.new_empty(m, heads, 2 * chunk, size)
    scan = _Scan(dy=torch.empty_like(dout), drive=drive, dstates=torch.empty_like(block.states))
    sizes = [order.counts[step] * heads for step in steps]
    dout = dout.flatten(0, 1)
    dwritten = torch.bmm(masked_scores(x, block).mT, dout).split(sizes)
    from_queries = torch.bmm(scaled(queries, decay).mT, dout).split(sizes)
    writes, reads = scaled(keys, x.to_end[within]).split(sizes), scaled(keys, write_back).mT.split(sizes)
    ends = decay[..., -1].reshape(-1, 1, 1).split(sizes)
    solves, dstates = block.solve.flatten(0, 1).mT.split(sizes), scan.dstates.flatten(0, 1).split(sizes)
    dys, flat = scan.dy.flatten(0, 1).split(sizes), dstate.flatten(0, 1)
    for i in reversed(range(len(sizes))):
        now = flat[: sizes[i]]
        dstates[i].copy_(now)
        torch.bmm(solves[i], torch.baddbmm(dwritten[i], writes[i], now), out=dys[i])
        torch.addcmul(from_queries[i], now, ends[i], out=now).baddbmm_(reads[i], dys[i])
    torch.mul(scan.dy, write_back.unsqueeze(-1), out=drive[:, :, :chunk])
    torch.mul(dout.view_as(scan.dy), decay.unsqueeze(-1), out=drive[:, :, chunk:])
    return scan


def _gradients(x: ChunkInputs, block: ChunkBlock, scan: _Scan, dout: Tensor, grads: Gradients, within: slice) -> None:
    """Fill ``grads`` with all terms that are independent of time order, for an entire block in one batch."""
    m, heads, chunk, _ = dout.shape
    keys = grouped(x.keys[within], x)
    beta, to_end = x.beta[within], x.to_end[within]
    # Through the state: d(k, q) of exp(gamma) (k, q) S, and dk of k^T exp(gamma_C - gamma) v'.
    from_read = grouped(torch.matmul(scan.drive, block.states.mT), x)
    from_write = torch.matmul(block.written, scan.dstates.mT).mul_(to_end.unsqueeze(-1))
    from_write = grouped(from_write, x)
    dgamma = (from_read * keys).sum(-1).view(m, heads, 2, chunk).sum(2)
    written = (from_write * keys[..., :chunk, :]).sum(-1).view(m, heads, chunk)
    dgamma -= written
    carried = torch.linalg.vecdot(scan.dstates.flatten(2), block.states.flatten(2))
    dgamma[..., -1] += written.sum(-1) + carried * x.decay[within][..., -1]
    torch.mul(scan.dy, beta.unsqueeze(-1), out=grads.v[within])
    dbeta = torch.linalg.vecdot(scan.dy, block.delta)
    # Within the chunk: d(gram) of L (the diagonal is no part of it) and of the scores.
    dgram = dout.new_empty(m, heads, 2 * chunk, chunk)
    dgram[:, :, :chunk] = torch.matmul(scan.dy, block.written.mT).neg_()
    dgram[:, :, chunk:] = torch.matmul(dout, block.written.mT)
    dgram.view(m, heads, 2, chunk, chunk).mul_(block.pair_decay.unsqueeze(2))
    dgram[:, :, :chunk].diagonal(dim1=-2, dim2=-1).zero_()
    products = (grouped(dgram, x) * grouped(block.gram, x)).view(m, heads, 2 * chunk, chunk)
    lower, scores = products[:, :, :chunk], products[:, :, chunk:]
    dlower = lower.sum(-1)
    dbeta += dlower
    # The diagonal of the scores cancels in rows minus columns: left out, it does not round.
    scores.diagonal(dim1=-2, dim2=-1).zero_()
    dgamma += dlower * beta
    dgamma -= torch.matmul(beta.unsqueeze(-2), lower).squeeze(-2)
    dgamma += scores.sum(-1) - scores.sum(-2)
    dgram[:, :, :chunk] *= beta.unsqueeze(-1)
    _keys_gradient(x, dgram, from_read, from_write, grads.keys[within], within)
    grads.beta[within] = dbeta
    grads.gamma[within] = dgamma


def _keys_gradient(
    x: ChunkInputs, dgram: Tensor, from_read: Tensor, from_write: Tensor, out: Tensor, within: slice
) -> None:
    """``out`` [m, H, 2C, K]: both sides of the gram matrix and what went through the state, summed over value heads."""
    chunk = dgram.shape[-1]
    keys = x.keys[within].flatten(0, 1)
    dgram = _sum_groups(grouped(dgram, x))
    flat = out.flatten(0, 1)
    torch.baddbmm(_sum_groups(from_read), dgram, keys[:, :chunk], out=flat)
    flat[:, :chunk] += torch.baddbmm(_sum_groups(from_write), dgram.mT, keys)


def _sum_groups(part: Tensor) -> Tensor:
    """[m, H, HV / H, R, D] -> [m * H, R, D]."""
    return (part.squeeze(2) if part.shape[2] == 1 else part.sum(2)).flatten(0, 1)
