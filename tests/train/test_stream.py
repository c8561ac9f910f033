"""Division of the packed stream into ranges, against a direct computation."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from slime_like.train.megatron.model.layout import token_layout
from slime_like.train.megatron.model.stream import StreamPart, stream_part


@st.composite
def streams(draw: st.DrawFn) -> tuple[int, np.ndarray]:
    """Draw cp and padded cu_seqlens."""
    cp = draw(st.sampled_from([1, 2, 4]))
    lengths = draw(st.lists(st.integers(1, 30), min_size=1, max_size=6))
    rows = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
    return cp, token_layout(rows, cp=cp).padded_cu_seqlens if cp > 1 else rows


def exchanged(parts: list[StreamPart], tokens_by_rank: list[np.ndarray]) -> list[np.ndarray]:
    """Return the tokens that each rank receives in an all-to-all of ``tokens_by_rank``, in stream order."""
    splits = [np.split(tokens_by_rank[rank], np.cumsum(part.send)[:-1]) for rank, part in enumerate(parts)]
    out: list[np.ndarray] = []
    for rank, part in enumerate(parts):
        pieces = [splits[source][rank] for source in range(len(parts))]
        assert tuple(map(len, pieces)) == part.receive
        out.append(np.concatenate(pieces)[part.order])
    return out


@given(streams())
def test_an_exchange_by_the_plan_gives_every_rank_its_consecutive_tokens(stream: tuple[int, np.ndarray]) -> None:
    cp, bounds = stream
    parts = [stream_part(bounds, cp=cp, cp_rank=rank) for rank in range(cp)]
    tokens_by_rank = [token_layout(bounds, cp=cp, cp_rank=rank).local_index for rank in range(cp)]
    received_tokens = exchanged(parts, tokens_by_rank)
    assert np.concatenate(received_tokens).tolist() == list(range(int(bounds[-1])))


@given(streams())
def test_pieces_histories_and_chains_agree_with_the_sequences(stream: tuple[int, np.ndarray]) -> None:
    cp, bounds = stream
    size = int(bounds[-1]) // cp
    sequence_of = np.repeat(np.arange(len(bounds) - 1), np.diff(bounds))
    parts = [stream_part(bounds, cp=cp, cp_rank=rank) for rank in range(cp)]
    for rank, part in enumerate(parts):
        own_sequences = sequence_of[rank * size : (rank + 1) * size]
        changes = np.flatnonzero(np.diff(own_sequences)) + 1
        assert part.cu_seqlens.tolist() == [0, *changes.tolist(), size]
        before = sequence_of[: rank * size]
        assert part.history == int((before == own_sequences[0]).sum())
        assert part.chain == tuple(r for r in range(rank) if own_sequences[0] in sequence_of[r * size : (r + 1) * size])
        is_cut = any(sequence_of[border - 1] == sequence_of[border] for border in range(size, int(bounds[-1]), size))
        assert part.is_cut == is_cut


def test_the_example_of_the_docstring() -> None:
    bounds = np.array([0, 4, 16], np.int32)
    first, second = (stream_part(bounds, cp=2, cp_rank=rank) for rank in range(2))
    assert (first.cu_seqlens.tolist(), first.history, first.chain) == ([0, 4, 8], 0, ())
    assert (second.cu_seqlens.tolist(), second.history, second.chain) == ([0, 8], 4, (0,))
    assert first.is_cut
    assert second.is_cut
