"""RMS norms over all heads of queries and keys in torch, instead of the Triton kernels of SGLang's MiniMax-M2."""

from __future__ import annotations

import torch
from torch import Tensor


def sums_of_squares(query: Tensor, key: Tensor) -> Tensor:
    """Return float32 [2 T]: the sums of squares of all tokens' queries [T, Dq] on this rank, then those of their keys [T, Dk]."""
    return torch.cat([x.float().square().sum(-1) for x in (query, key)])


def normalise(
    query: Tensor,
    key: Tensor,
    query_weight: Tensor,
    key_weight: Tensor,
    squares: Tensor,
    tp_world: int = 1,
    eps: float = 1e-5,
) -> tuple[Tensor, Tensor]:
    """Return the RMS-normalised queries and keys. ``squares``: results of ``sums_of_squares``, summed over ``tp_world`` ranks."""
    pairs = ((query, query_weight), (key, key_weight))
    out: list[Tensor] = []
    for (x, weight), total in zip(pairs, squares[: 2 * len(query)].chunk(2), strict=True):
        inverse = (total / (x.shape[-1] * tp_world) + eps).rsqrt()[:, None]
        out.append((x.float() * inverse * weight.float()).to(x.dtype))
    return out[0], out[1]
