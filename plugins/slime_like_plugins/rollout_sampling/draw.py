"""Stateless sampling of tokens in pure torch, with one seed per row.

Axes: B requests, V vocabulary.
"""

from __future__ import annotations

import torch
from torch import Tensor

BLOCK = 256  # the vocabulary is searched in two levels: blocks of this size, then tokens of a block

# Constants of the finaliser of SplitMix64 (Steele, Lea and Flood, "Fast splittable pseudorandom number generators",
# 2014), as signed 64-bit integers; torch's int64 arithmetic wraps in the same way.
GAMMA = 0x9E3779B97F4A7C15 - (1 << 64)
FIRST = 0xBF58476D1CE4E5B9 - (1 << 64)
SECOND = 0x94D049BB133111EB - (1 << 64)


def _shift_right(x: Tensor, bits: int) -> Tensor:
    """Return the logical right shift of int64 ``x``."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)


def _mix_bits(x: Tensor) -> Tensor:
    """Apply SplitMix64's finaliser to int64 ``x``."""
    x = (x ^ _shift_right(x, 30)) * FIRST
    x = (x ^ _shift_right(x, 27)) * SECOND
    return x ^ _shift_right(x, 31)


def uniform(seeds_B: Tensor, positions_B: Tensor) -> Tensor:
    """Return float64 [B] in [0, 1), which depends only on seed and position, not on batch or schedule."""
    state = _mix_bits(seeds_B.long() + GAMMA)
    bits = _mix_bits(state ^ _mix_bits((positions_B.long() + 1) * GAMMA))
    return _shift_right(bits, 11).double() * 2.0**-53


def _search(weights_BN: Tensor, target_B: Tensor) -> tuple[Tensor, Tensor]:
    """Return the first index whose running sum exceeds the target, and the target minus the sum before that index.

    An index of weight 0 is never returned: the target is clamped below the total, and weight 0 does not change the sum.
    """
    sums_BN = weights_BN.cumsum(-1, dtype=torch.float64)
    total_B = sums_BN[:, -1]
    target_B1 = torch.minimum(target_B, torch.nextafter(total_B, torch.zeros_like(total_B)))[:, None]
    index_B1 = torch.searchsorted(sums_BN, target_B1, right=True)
    before_B1 = (sums_BN - weights_BN).gather(1, index_B1)
    return index_B1[:, 0], (target_B1 - before_B1)[:, 0].clamp_min(0.0)


def draw(weights_BV: Tensor, uniform_B: Tensor) -> Tensor:
    """Return int64 [B], one index per row, with probability proportional to its weight (inverse transform sampling)."""
    rows, vocabulary = weights_BV.shape
    blocks = -(-vocabulary // BLOCK)
    if blocks == 1:
        total_B = weights_BV.sum(-1, dtype=torch.float64)
        return _search(weights_BV, uniform_B * total_B)[0]
    padded = weights_BV
    if blocks * BLOCK != vocabulary:
        padded = weights_BV.new_zeros(rows, blocks * BLOCK)
        padded[:, :vocabulary] = weights_BV
    tiles = padded.view(rows, blocks, BLOCK)
    sums_BN = tiles.sum(-1, dtype=torch.float64)
    block_B, residual_B = _search(sums_BN, uniform_B * sums_BN.sum(-1))
    within_B, _ = _search(tiles[torch.arange(rows, device=tiles.device), block_B], residual_B)
    return block_B * BLOCK + within_B


def filtered(probs_BV: Tensor, top_p_B: Tensor, top_k_B: Tensor, min_p_B: Tensor) -> tuple[Tensor, Tensor]:
    """Return probabilities in descending order, 0 if excluded by top-k, nucleus or min-p, and their token ids.

    min-p is a share of the most probable token's probability. Same rules as
    ``top_k_top_p_min_p_sampling_from_probs_torch`` in ``sglang.srt.layers.sampler``.
    """
    sorted_BV, tokens_BV = torch.sort(probs_BV, stable=True, dim=-1, descending=True)
    before_BV = sorted_BV.cumsum(-1) - sorted_BV
    rank = torch.arange(probs_BV.shape[1], device=probs_BV.device)
    excluded_BV = (before_BV > top_p_B[:, None]) | (rank >= top_k_B[:, None])
    excluded_BV |= sorted_BV < sorted_BV[:, :1] * min_p_B[:, None]
    return sorted_BV.masked_fill_(excluded_BV, 0.0), tokens_BV
