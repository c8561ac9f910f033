"""Hand-written backward of ``chunk_forward``; autograd would save every intermediate tensor of every chunk.

With the names of ``chunk_forward``, y = beta (v - exp(gamma) k S), and dS' the gradient of the state after a chunk::

    dv' = P^T do + exp(gamma_C - gamma) k dS'       dy = (I + L)^-T dv'       dv = beta dy
    dS  = exp(gamma_C) dS' + k^T (-exp(gamma) dv) + q^T (exp(gamma) do)
    dL  = -dy v'^T                                  dP = do v'^T

where P are the masked, decayed scores q k^T. The other gradients are products of these with tensors saved by forward.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from slime_like_plugins.qwen_gdn.chunk_forward import MATRICES, ChunkBlock, ChunkInputs, grouped, masked_scores, scaled
from slime_like_plugins.qwen_gdn.packing import ChunkOrder


@dataclass(frozen=True, slots=True)
class Gradients:
    """Gradients of ``ChunkInputs`` and of the initial states.

    ``decay`` and ``to_end`` are functions of ``gamma``, so the gradient of ``gamma`` includes theirs.
    """

    keys: Tensor  # [M, H, 2C, K] of the keys of norm 1 and the scaled queries
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
    """Return the gradients of the inputs.

    ``dout`` [M, HV, C, V] is the gradient of the output, ``dfinal`` [N, HV, K, V] that of the final states. ``dfinal`` and
    the result's ``state`` are in the order of ``order.sequences``.
    """
    grads = Gradients(
        keys=torch.empty_like(x.keys),
        v=torch.empty_like(x.v),
        beta=torch.empty_like(x.beta),
        gamma=torch.empty_like(x.gamma),
        state=dfinal.clone(),
    )
    blocks_of_steps = list(order.blocks(x.v.shape[1], MATRICES))
    for steps, block in zip(reversed(blocks_of_steps), reversed(blocks), strict=True):
        chunks = order.chunks_of(steps)
        scan = _reverse_scan(x, block, dout[chunks], grads.state, steps, order)
        _gradients(x, block, scan, dout[chunks], grads, chunks)
    return grads


def project(keys: Tensor, dkeys: Tensor, rstd: Tensor, scale: float) -> Tensor:
    """Return the gradients with respect to keys and queries before normalisation; ``dkeys`` [M, H, 2C, K] is overwritten."""
    chunk = keys.shape[2] // 2
    dkeys[:, :, chunk:] *= scale
    dots = torch.linalg.vecdot(dkeys, keys)
    dots[:, :, chunk:] /= scale * scale  # both factors carry the queries' ``scale``
    dkeys -= keys * dots.unsqueeze(-1)
    dkeys *= rstd.unsqueeze(-1)
    return dkeys


def _reverse_scan(
    x: ChunkInputs, block: ChunkBlock, dout: Tensor, dstate: Tensor, steps: range, order: ChunkOrder
) -> _Scan:
    """Run the recurrence of dS backwards over a block, updating ``dstate`` [N, HV, K, V] in place."""
    m, heads, chunk, size = dout.shape
    chunks = order.chunks_of(steps)
    decay, write_back = x.decay[chunks], (x.beta[chunks] * x.decay[chunks]).neg_()
    keys, queries = x.keys[chunks, :, :chunk], x.keys[chunks, :, chunk:]
    drive = dout.new_empty(m, heads, 2 * chunk, size)
    scan = _Scan(dy=torch.empty_like(dout), drive=drive, dstates=torch.empty_like(block.states))
    sizes = [order.counts[step] * heads for step in steps]
    dout = dout.flatten(0, 1)
    dwritten = torch.bmm(masked_scores(x, block).mT, dout).split(sizes)
    from_queries = torch.bmm(scaled(queries, decay).mT, dout).split(sizes)
    writes, reads = scaled(keys, x.to_end[chunks]).split(sizes), scaled(keys, write_back).mT.split(sizes)
    ends = decay[..., -1].reshape(-1, 1, 1).split(sizes)
    solves, dstates = block.solve.flatten(0, 1).mT.split(sizes), scan.dstates.flatten(0, 1).split(sizes)
    dys, flat = scan.dy.flatten(0, 1).split(sizes), dstate.flatten(0, 1)
    for i in reversed(range(len(sizes))):
        current = flat[: sizes[i]]
        dstates[i].copy_(current)
        torch.bmm(solves[i], torch.baddbmm(dwritten[i], writes[i], current), out=dys[i])
        torch.addcmul(from_queries[i], current, ends[i], out=current).baddbmm_(reads[i], dys[i])
    torch.mul(scan.dy, write_back.unsqueeze(-1), out=drive[:, :, :chunk])
    torch.mul(dout.view_as(scan.dy), decay.unsqueeze(-1), out=drive[:, :, chunk:])
    return scan


def _gradients(x: ChunkInputs, block: ChunkBlock, scan: _Scan, dout: Tensor, grads: Gradients, chunks: slice) -> None:
    """Write the gradients of a block's ``chunks`` to ``grads`` in one batch, from the results of the reverse recurrence."""
    m, heads, chunk, _ = dout.shape
    keys = grouped(x.keys[chunks], x)
    beta, to_end = x.beta[chunks], x.to_end[chunks]
    # Through the state: d(k, q) of exp(gamma) (k, q) S, and dk of k^T exp(gamma_C - gamma) v'.
    from_read = grouped(torch.matmul(scan.drive, block.states.mT), x)
    from_write = torch.matmul(block.new_values, scan.dstates.mT).mul_(to_end.unsqueeze(-1))
    from_write = grouped(from_write, x)
    dgamma = (from_read * keys).sum(-1).view(m, heads, 2, chunk).sum(2)
    write_gradient = (from_write * keys[..., :chunk, :]).sum(-1).view(m, heads, chunk)
    dgamma -= write_gradient
    carried = torch.linalg.vecdot(scan.dstates.flatten(2), block.states.flatten(2))
    dgamma[..., -1] += write_gradient.sum(-1) + carried * x.decay[chunks][..., -1]
    torch.mul(scan.dy, beta.unsqueeze(-1), out=grads.v[chunks])
    dbeta = torch.linalg.vecdot(scan.dy, block.delta)
    # Within the chunk: d(gram) of L (without its diagonal) and of the scores.
    dgram = dout.new_empty(m, heads, 2 * chunk, chunk)
    dgram[:, :, :chunk] = torch.matmul(scan.dy, block.new_values.mT).neg_()
    dgram[:, :, chunk:] = torch.matmul(dout, block.new_values.mT)
    dgram.view(m, heads, 2, chunk, chunk).mul_(block.pair_decay.unsqueeze(2))
    dgram[:, :, :chunk].diagonal(dim1=-2, dim2=-1).zero_()
    products = (grouped(dgram, x) * grouped(block.gram, x)).view(m, heads, 2 * chunk, chunk)
    lower, scores = products[:, :, :chunk], products[:, :, chunk:]
    dlower = lower.sum(-1)
    dbeta += dlower
    # The diagonal of the scores cancels in rows minus columns; zeroing it avoids the rounding error.
    scores.diagonal(dim1=-2, dim2=-1).zero_()
    dgamma += dlower * beta
    dgamma -= torch.matmul(beta.unsqueeze(-2), lower).squeeze(-2)
    dgamma += scores.sum(-1) - scores.sum(-2)
    dgram[:, :, :chunk] *= beta.unsqueeze(-1)
    _keys_gradient(x, dgram, from_read, from_write, grads.keys[chunks], chunks)
    grads.beta[chunks] = dbeta
    grads.gamma[chunks] = dgamma


def _keys_gradient(
    x: ChunkInputs, dgram: Tensor, from_read: Tensor, from_write: Tensor, out: Tensor, chunks: slice
) -> None:
    """Write the gradients of keys and queries to ``out`` [m, H, 2C, K], summed over value heads.

    They come through both sides of the gram matrix and through the state.
    """
    chunk = dgram.shape[-1]
    keys = x.keys[chunks].flatten(0, 1)
    dgram = _sum_groups(grouped(dgram, x))
    flat = out.flatten(0, 1)
    torch.baddbmm(_sum_groups(from_read), dgram, keys[:, :chunk], out=flat)
    flat[:, :chunk] += torch.baddbmm(_sum_groups(from_write), dgram.mT, keys)


def _sum_groups(part: Tensor) -> Tensor:
    """Return the sum of ``part`` [m, H, HV / H, R, D] over the value heads of each key head: [m * H, R, D]."""
    return (part.squeeze(2) if part.shape[2] == 1 else part.sum(2)).flatten(0, 1)
