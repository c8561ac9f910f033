"""Layout of packed tokens on a rank: padding, positions, next tokens and context parallel slices.

No other file computes context parallel indices for attention. Indices are computed with numpy on the host, once per
micro-batch, and copied to the device.

Context parallel layout (megatron's): a sequence, padded to a multiple of ``2 * cp``, is cut into ``2 * cp`` equal chunks;
rank r holds chunks r and ``2 * cp - 1 - r``, which balances the work of the causal mask over the ranks.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from slime_like.types import I32, I64


@dataclass(frozen=True, slots=True)
class Predictions:
    """N tokens to predict: ``source`` indexes this rank's hidden states, ``target`` the tokens of the packed batch."""

    source: I64  # [N], local
    target: I64  # [N], index of the predicted token in the packed batch


@dataclass(frozen=True, slots=True)
class TokenLayout:
    """Layout of S sequences with T tokens in total and P tokens after padding, of which this rank holds L = P / cp."""

    cu_seqlens: I32  # [S + 1], of the packed batch
    padded_cu_seqlens: I32  # [S + 1], or [S + 2] with a sequence of padding at the end
    token_index: I64  # [L], index of each local token in the packed batch, -1 for padding
    next_index: I64  # [L], index of the next token of the sequence, -1 at sequence ends and padding
    position_ids: I64  # [P], position of every padded token in its sequence
    local_index: I64  # [L], index of each local token among the P padded tokens

    @property
    def num_tokens(self) -> int:
        """Number of tokens T, without padding."""
        return int(self.cu_seqlens[-1])

    @property
    def num_sequences(self) -> int:
        """Number of sequences, S."""
        return len(self.cu_seqlens) - 1

    def take[Scalar: np.generic](self, column_T: npt.NDArray[Scalar], fill: Any) -> npt.NDArray[Scalar]:
        """Return this rank's part [L, ...] of a column [T, ...], with ``fill`` at padding."""
        return _gather(column_T, self.token_index, fill)

    def next_token[Scalar: np.generic](self, column_T: npt.NDArray[Scalar], fill: Any) -> npt.NDArray[Scalar]:
        """Return the column's value [L] at the token after each local token; ``fill`` at sequence ends and padding."""
        return _gather(column_T, self.next_index, fill)

    def predictions(self, mask_T: npt.NDArray[np.bool_]) -> Predictions:
        """Return this rank's predictions of the tokens that ``mask_T`` selects. The first token of a sequence has none."""
        is_source_L = self.next_token(mask_T, False)
        source = np.flatnonzero(is_source_L)
        return Predictions(source, self.next_index[source])

    def sequence_of(self, token_index: I64) -> I64:
        """Return [N]: the index of the sequence that contains each token index [N]."""
        return np.searchsorted(self.cu_seqlens, token_index, side="right").astype(np.int64) - 1

    def segment_sum[Scalar: np.generic](self, values_N: npt.NDArray[Scalar], token_index_N: I64) -> npt.NDArray[Scalar]:
        """Return [S]: the sum per sequence of the values of N tokens, which may be the tokens of one cp rank or of all."""
        out = np.zeros(self.num_sequences, values_N.dtype)
        np.add.at(out, self.sequence_of(token_index_N), values_N)
        return out


def token_layout(cu_seqlens: I32, *, tp: int = 1, cp: int = 1, cp_rank: int = 0, min_tokens: int = 1) -> TokenLayout:
    """Lay out packed sequences for one rank.

    Sequences are padded to multiples of ``2 * cp`` when cp > 1. A sequence of padding at the end makes P at least
    ``min_tokens`` and a multiple of tp (of ``tp * 2 * cp`` when cp > 1), so that tensor parallel ranks have equal shares.

    Example: sequences of 3 and 2 tokens with tp=2: ``padded_cu_seqlens`` is [0, 3, 5, 6].
    """
    unit = 1 if cp == 1 else 2 * cp
    lengths = np.diff(cu_seqlens).astype(np.int64)
    padded_lengths = -(-lengths // unit) * unit
    num_padded = int(padded_lengths.sum())
    tail = max(num_padded, min_tokens) - num_padded
    tail += -(num_padded + tail) % (tp * unit)
    if tail:
        lengths, padded_lengths = np.append(lengths, 0), np.append(padded_lengths, tail)
    starts = np.concatenate([[0], np.cumsum(padded_lengths)])
    position_ids = np.arange(starts[-1]) - np.repeat(starts[:-1], padded_lengths)
    row_start = np.append(cu_seqlens[:-1], 0)[: len(padded_lengths)] if tail else cu_seqlens[:-1]
    length_of = np.repeat(lengths, padded_lengths)
    token_index = np.where(position_ids < length_of, position_ids + np.repeat(row_start, padded_lengths), -1)
    next_index = np.where(position_ids + 1 < length_of, token_index + 1, -1)
    local = zigzag(position_ids, np.repeat(padded_lengths, padded_lengths), cp, cp_rank)
    return TokenLayout(
        cu_seqlens=cu_seqlens,
        padded_cu_seqlens=starts.astype(np.int32),
        token_index=token_index[local].astype(np.int64),
        next_index=next_index[local].astype(np.int64),
        position_ids=position_ids.astype(np.int64),
        local_index=local.astype(np.int64),
    )


def zigzag(position_ids: I64, padded_length_of: I64, cp: int, rank: int) -> I64:
    """Return the indices of the padded tokens in chunks ``rank`` and ``2 * cp - 1 - rank`` of each sequence's ``2 * cp`` chunks.

    ``position_ids`` [P] has each token's position in its sequence, ``padded_length_of`` [P] the sequence's padded length.
    """
    chunk = position_ids * (2 * cp) // padded_length_of
    return np.flatnonzero((chunk == rank) | (chunk == 2 * cp - 1 - rank)) if cp > 1 else np.arange(len(position_ids))


@dataclass(frozen=True, slots=True)
class AttentionPieces:
    """Causal attention of one rank, divided into R independent pieces.

    The last query of a piece attends to all keys of the piece, the query before it to all but the last key, and so on.
    Without context parallelism, a piece is a sequence. With context parallelism, rank r has two pieces per sequence: the
    queries of chunk r or ``2 * cp - 1 - r``, with the keys of that chunk and of all earlier chunks.
    """

    query_cu: I32  # [R + 1], of the local tokens
    key_cu: I32  # [R + 1], of the keys
    key_index: I64 | None  # [K], position of each key among the tokens of all ranks, ordered by rank

    @property
    def lengths(self) -> tuple[tuple[int, int], ...]:
        """(Number of queries, number of keys) of each piece."""
        return tuple(zip(np.diff(self.query_cu).tolist(), np.diff(self.key_cu).tolist(), strict=True))


def attention_pieces(padded_cu_seqlens: I32, *, cp: int = 1, cp_rank: int = 0) -> AttentionPieces:
    """Return the attention pieces of one rank.

    Example: one sequence of 8 with cp=2: rank 0 has pieces of (2 queries, 2 keys) and (2 queries, 8 keys), rank 1 of
    (2, 4) and (2, 6).
    """
    if cp == 1:
        return AttentionPieces(padded_cu_seqlens, padded_cu_seqlens, None)
    padded_lengths = np.diff(padded_cu_seqlens).astype(np.int64)
    chunks = padded_lengths // (2 * cp)
    num_keys = np.stack([chunks * (cp_rank + 1), chunks * (2 * cp - cp_rank)], 1).ravel()  # keys per piece
    key_cu = np.concatenate([[0], np.cumsum(num_keys)])
    starts = np.repeat(padded_cu_seqlens[:-1].astype(np.int64), 2)
    key_position = np.arange(key_cu[-1]) - np.repeat(key_cu[:-1] - starts, num_keys)
    return AttentionPieces(
        query_cu=np.concatenate([[0], np.cumsum(np.repeat(chunks, 2))]).astype(np.int32),
        key_cu=key_cu.astype(np.int32),
        key_index=np.argsort(tokens_by_rank(padded_cu_seqlens, cp))[key_position],
    )


def tokens_by_rank(padded_cu_seqlens: I32, cp: int) -> I64:
    """Return the indices [P] of the padded tokens, ordered by the context parallel rank that holds them.

    Example: one sequence of 8 with cp=2: [0, 1, 6, 7, 2, 3, 4, 5].
    """
    padded_lengths = np.diff(padded_cu_seqlens).astype(np.int64)
    position_ids = np.arange(padded_cu_seqlens[-1]) - np.repeat(padded_cu_seqlens[:-1], padded_lengths)
    length_of = np.repeat(padded_lengths, padded_lengths)
    return np.concatenate([zigzag(position_ids, length_of, cp, rank) for rank in range(cp)])


def _gather[Scalar: np.generic](column_T: npt.NDArray[Scalar], index_L: I64, fill: Any) -> npt.NDArray[Scalar]:
    out = np.full((len(index_L), *column_T.shape[1:]), fill, dtype=column_T.dtype)
    inside = index_L >= 0
    out[inside] = column_T[index_L[inside]]
    return out
