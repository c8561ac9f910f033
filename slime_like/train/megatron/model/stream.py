"""Layout of recurrent layers, in which each context parallel rank has a contiguous range of the packed stream.

For attention, each rank has two chunks of every sequence (``layout``), which balances the work of the causal mask. A
recurrence needs no balancing. Each rank has consecutive tokens, so that only one state and a few tokens cross each border.
Borders divide the stream evenly and may cut sequences. Index arithmetic runs in numpy on the host, once per micro-batch.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from slime_like.train.megatron.model.layout import zigzag
from slime_like.types import I32, I64


@dataclass(frozen=True, slots=True)
class StreamPart:
    """One rank's range of a stream of P tokens: L = P / cp consecutive tokens, in N pieces of sequences."""

    send: tuple[int, ...]  # of this rank's tokens in ``layout``, the number that go to each rank
    receive: tuple[int, ...]  # number of tokens that come from each rank
    order: I64  # [L], index of each token of the range among the received tokens
    cu_seqlens: I32  # [N + 1], of the range
    history: int  # number of tokens of the first piece's sequence on earlier ranks
    chain: tuple[int, ...]  # earlier ranks with tokens of that sequence, in order
    is_cut: bool  # True if any border cuts a sequence; the same on all ranks


def stream_part(padded_cu_seqlens: I32, *, cp: int, cp_rank: int) -> StreamPart:
    """Return one rank's range of the packed stream.

    ``padded_cu_seqlens`` is that of ``TokenLayout``, in which the length of each sequence is a multiple of ``2 * cp``.

    Example: with cp=2, sequences of 4 and 12 tokens are divided into two ranges of 8 tokens. Rank 0 has pieces of 4 and 4
    tokens. Rank 1 has one piece of 8 tokens, and the first 4 tokens of its sequence are on rank 0.
    """
    bounds = padded_cu_seqlens.astype(np.int64)
    size = int(bounds[-1]) // cp
    start, stop = cp_rank * size, (cp_rank + 1) * size
    lengths = np.diff(bounds)
    length_of = np.repeat(lengths, lengths)
    position_ids = np.arange(bounds[-1]) - np.repeat(bounds[:-1], lengths)
    by_rank = [zigzag(position_ids, length_of, cp, rank) for rank in range(cp)]
    received_tokens = [tokens[(start <= tokens) & (tokens < stop)] for tokens in by_rank]
    inner = bounds[(start < bounds) & (bounds < stop)]
    history = int(position_ids[start])
    first = (start - history) // size  # the rank on which the first piece's sequence begins
    borders = size * np.arange(1, cp)
    return StreamPart(
        send=tuple(np.bincount(by_rank[cp_rank] // size, minlength=cp).tolist()),
        receive=tuple(len(tokens) for tokens in received_tokens),
        order=np.argsort(np.concatenate(received_tokens)),
        cu_seqlens=np.concatenate([[start], inner, [stop]]).astype(np.int32) - np.int32(start),
        history=history,
        chain=tuple(range(first, cp_rank)) if history else (),
        is_cut=not np.isin(borders, bounds).all(),
    )
