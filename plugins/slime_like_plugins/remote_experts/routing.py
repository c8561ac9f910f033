"""Split of a batch into local pairs (token, expert), and buckets of tokens by their number of remote experts."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from torch import Tensor, from_numpy

from slime_like_plugins.remote_experts.compute import Ids, Weights

ONE_REQUEST_ROWS = 64  # maximum number of tokens with remote experts that form a single bucket


class ExpertRows:
    """Location of each expert of a layer: its index along the first axis of ``w13`` and ``w2`` in the engine or in the worker."""

    def __init__(self, num_experts: int, remote: Sequence[int]) -> None:
        """Assign indices to ``num_experts`` routed and shared experts, of which ``remote`` are in the worker's memory."""
        self.remote = tuple(sorted(remote))
        is_remote = np.zeros(num_experts, bool)
        is_remote[list(self.remote)] = True
        self.num_local = num_experts - len(self.remote)
        # Id -1, a pair without an expert, indexes the last entry.
        self.local_rows = np.full(num_experts + 1, -1, np.int32)
        self.local_rows[:-1][~is_remote] = np.arange(self.num_local)
        self.remote_rows = np.full(num_experts + 1, -1, np.int32)
        self.remote_rows[:-1][is_remote] = np.arange(len(self.remote))


@dataclass(frozen=True, slots=True)
class TokenBucket:
    """Tokens of a batch that are sent in one or more requests."""

    tokens: NDArray[np.int64]  # ascending
    ids: Ids  # [N, K]; -1: no expert
    weights: Weights  # [N, K]

    def chunks(self, max_rows: int) -> Iterator[TokenBucket]:
        """Yield parts of at most ``max_rows`` tokens."""
        for start in range(0, len(self.tokens), max_rows):
            part = slice(start, start + max_rows)
            yield TokenBucket(self.tokens[part], self.ids[part], self.weights[part])

    def rows_of(self, x_TH: Tensor) -> Tensor:
        """Return the rows of the tokens: a view if they are consecutive, otherwise a copy."""
        index = self.index()
        return x_TH[index]

    def index(self) -> slice | Tensor:
        """Return the index of the tokens: a slice if they are consecutive, otherwise a tensor."""
        first, last = int(self.tokens[0]), int(self.tokens[-1])
        return slice(first, last + 1) if last - first + 1 == len(self.tokens) else from_numpy(self.tokens)


def split(ids: Ids, weights: Weights, rows: ExpertRows) -> tuple[Ids, list[TokenBucket]]:
    """Return the index of each pair's expert among the engine's experts, [T, K], and buckets of the tokens with remote experts.

    A pair is a token and one of its K experts. The index is -1 if the expert is not in the engine. The buckets are in
    ascending order of the number of remote experts per token.

    Pairs of weight 0 get index -1 and are not computed. A token without remote experts is in no bucket. If at most
    ``ONE_REQUEST_ROWS`` tokens have remote experts, as in a decode step, they form a single bucket. That is usually one
    request, so the worker computes each expert once.
    """
    local, remote = rows.local_rows.take(ids), rows.remote_rows.take(ids)
    if not (is_used := weights != 0).all():
        local, remote = np.where(is_used, local, -1), np.where(is_used, remote, -1)
    is_remote = remote >= 0
    counts = is_remote.sum(1)
    tokens = np.flatnonzero(counts)
    if not len(tokens):
        return local, []
    if len(tokens) <= ONE_REQUEST_ROWS:
        return local, [_padded(tokens, counts, remote, weights)]
    return local, [
        _selected(np.flatnonzero(counts == count), is_remote, remote, weights)
        for count in np.flatnonzero(np.bincount(counts)).tolist()
        if count
    ]


def _padded(tokens: NDArray[np.int64], counts: NDArray[np.int64], remote: Ids, weights: Weights) -> TokenBucket:
    """Return one bucket of ``tokens``; a token with fewer remote experts than another is padded with id -1 and weight 0."""
    if len(tokens) < len(counts):
        counts, remote, weights = counts[tokens], remote[tokens], weights[tokens]
    if (num_selected := int(counts.max())) < remote.shape[1]:
        pairs = np.arange(len(tokens))[:, None], np.argsort(remote < 0, 1, kind="stable")[:, :num_selected]
        remote, weights = remote[pairs], weights[pairs]
    return TokenBucket(tokens, remote, np.where(remote < 0, np.float32(0), weights))


def _selected(tokens: NDArray[np.int64], is_remote: NDArray[np.bool_], remote: Ids, weights: Weights) -> TokenBucket:
    """Return the bucket of ``tokens``, which have the same number of remote experts."""
    if len(tokens) < len(is_remote):
        is_remote, remote, weights = is_remote[tokens], remote[tokens], weights[tokens]
    shape = (len(tokens), -1)
    return TokenBucket(tokens, remote[is_remote].reshape(shape), weights[is_remote].reshape(shape))
