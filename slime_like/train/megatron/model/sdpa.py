"""Causal attention over packed sequences with few calls of torch's scaled dot product attention.

Sequences of similar length share a call. Padding is at the end of a sequence, so no query of the sequence attends to it, and
the results of padding queries are dropped. Neither values nor gradients depend on padding.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from slime_like.types import I32, I64

MIN_RUN = 4  # sequences keep their order if runs of equal length have at least this many sequences on average
MAX_PADDING = 1 / 8  # relative to a batch's longest sequence


@dataclass(frozen=True, slots=True)
class AttentionBatches:
    """Division of T packed tokens into batches of sequences, each batch padded to one length, with P slots in total."""

    shapes: tuple[tuple[int, int], ...]  # (number of sequences, padded length) of each batch
    slot_of: Tensor | None = None  # I64 [T], slot of each token; None: slots are the packed tokens
    token_of: Tensor | None = None  # I64 [P], token of each slot; arbitrary at padding
    padding: Tensor | None = None  # I64, the slots without a token

    def pad(self, x_T: Tensor) -> Tensor:
        """Map [T, ...] to [P, ...]."""
        return x_T if self.slot_of is None else _Pad.apply(x_T, self)  # pyright: ignore[reportReturnType]

    def unpad(self, x_P: Tensor) -> Tensor:
        """Map [P, ...] to [T, ...]."""
        return x_P if self.slot_of is None else _Unpad.apply(x_P, self)  # pyright: ignore[reportReturnType]


def attention_batches(cu_seqlens: I32, device: torch.device) -> AttentionBatches:
    """Group sequences into batches of one attention call each.

    Each run of neighbours of equal length is a batch, without reordering. If there are too many runs, sequences are sorted by
    length, and those in a batch have at least 7/8 of the length of the longest. Example: lengths 8, 8, 7 and 2 become a batch of
    3 sequences padded to 8 tokens, with one padding slot, and a batch of 1 sequence of 2 tokens.
    """
    lengths = np.diff(cu_seqlens).astype(np.int64)
    runs = _runs(lengths)
    if len(runs) * MIN_RUN <= len(lengths) or len(runs) == 1:
        return AttentionBatches(runs)
    order = np.argsort(-lengths, kind="stable")
    shapes = _shapes(lengths[order].tolist())
    slots, slot_of = 0, np.empty(int(cu_seqlens[-1]), np.int64)
    order_iterator = iter(order.tolist())
    for count, longest in shapes:
        for sequence in (next(order_iterator) for _ in range(count)):
            slot_of[cu_seqlens[sequence] : cu_seqlens[sequence + 1]] = slots + np.arange(lengths[sequence])
            slots += longest
    token_of = np.full(slots, -1, np.int64)
    token_of[slot_of] = np.arange(len(slot_of))
    padding = np.flatnonzero(token_of < 0)
    device_tensors = (torch.from_numpy(x).to(device) for x in (slot_of, np.maximum(token_of, 0), padding))
    return AttentionBatches(shapes, *device_tensors)


def in_batches(query: Tensor, key: Tensor, value: Tensor, batches: AttentionBatches, scale: float | None) -> Tensor:
    """Map query [T, heads, dim], key and value [T, groups, dim] to [T, heads, dim]."""
    sizes = [sequences * length for sequences, length in batches.shapes]
    columns = (batches.pad(x).split(sizes) for x in (query, key, value))
    parts = [
        _attend([x.unflatten(0, shape).transpose(1, 2) for x in part], scale).transpose(1, 2).flatten(0, 1)
        for shape, *part in zip(batches.shapes, *columns, strict=True)
    ]
    return batches.unpad(parts[0] if len(parts) == 1 else torch.cat(parts))


def in_pieces(
    query: Tensor, key: Tensor, value: Tensor, lengths: Sequence[tuple[int, int]], scale: float | None
) -> Tensor:
    """Map query [L, heads, dim], key and value [K, groups, dim] to [L, heads, dim], in one call per piece.

    ``lengths`` has the number of queries and of keys of each piece (``layout.AttentionPieces``). The last query of a piece
    attends to all keys of the piece, the query before it to all but the last key, and so on.
    """
    queries, keys = (list(counts) for counts in zip(*lengths, strict=True))
    # split, not slicing: the backward of split is one concatenation instead of one full-size buffer per sequence
    sizes = ((query, queries), (key, keys), (value, keys))
    parts = zip(*(x.transpose(0, 1)[None].split(counts, 2) for x, counts in sizes), strict=True)
    return torch.cat([_attend(part, scale) for part in parts], 2)[0].transpose(0, 1)


def _attend(columns: Sequence[Tensor], scale: float | None) -> Tensor:
    """Map query [b, heads, q, dim], key and value [b, groups, k, dim] to [b, heads, q, dim].

    The causal mask is aligned at the ends: the last query attends to all keys, the query before it to all but the last.
    """
    query, key, value = columns
    q, k = query.shape[2], key.shape[2]
    mask = None if q == k else torch.ones(q, k, dtype=torch.bool, device=query.device).tril(k - q)
    return F.scaled_dot_product_attention(
        query, key, value, attn_mask=mask, is_causal=q == k, scale=scale, enable_gqa=True
    )


def _runs(lengths: I64) -> tuple[tuple[int, int], ...]:
    """Return (count, length) of each run of neighbours of equal length."""
    starts = np.flatnonzero(np.diff(lengths, prepend=-1))
    counts = np.diff(starts, append=len(lengths))
    return tuple(zip(counts.tolist(), lengths[starts].tolist(), strict=True))


def _shapes(lengths: Sequence[int]) -> tuple[tuple[int, int], ...]:
    """Return (number of sequences, padded length) of each batch. ``lengths`` are in descending order."""
    shapes: list[tuple[int, int]] = []
    for length in lengths:
        if shapes and shapes[-1][1] - length <= MAX_PADDING * shapes[-1][1]:
            shapes[-1] = (shapes[-1][0] + 1, shapes[-1][1])
        else:
            shapes.append((1, length))
    return tuple(shapes)


class _Pad(torch.autograd.Function):
    """Gather tokens into slots. Padding slots repeat a token, so that they are finite; their gradient is dropped."""

    @staticmethod
    def forward(ctx: Any, x_T: Tensor, batches: AttentionBatches) -> Tensor:
        assert batches.token_of is not None
        ctx.batches = batches
        return x_T.index_select(0, batches.token_of)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return grads[0].index_select(0, ctx.batches.slot_of), None


class _Unpad(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_P: Tensor, batches: AttentionBatches) -> Tensor:
        assert batches.slot_of is not None
        ctx.batches = batches
        return x_P.index_select(0, batches.slot_of)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return grads[0].index_select(0, ctx.batches.token_of).index_fill_(0, ctx.batches.padding, 0.0), None
