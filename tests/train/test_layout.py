"""TokenLayout: each token is on exactly one context parallel rank; next tokens and sums per sequence are correct."""

from __future__ import annotations

import itertools

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from slime_like.train.megatron.model.layout import TokenLayout, attention_pieces, token_layout, tokens_by_rank

lengths = st.lists(st.integers(1, 23), max_size=6)
sizes = st.sampled_from([(1, 1), (2, 1), (4, 1), (1, 2), (2, 2), (1, 4), (3, 2)])


def bounds(row: list[int]) -> np.ndarray:
    return np.concatenate([[0], np.cumsum(row)]).astype(np.int32)


def ranks(row: list[int], tp: int, cp: int) -> list[TokenLayout]:
    return [token_layout(bounds(row), tp=tp, cp=cp, cp_rank=r) for r in range(cp)]


@given(lengths, sizes)
def test_ranks_have_every_token_once_and_equally_many_tokens(row: list[int], size: tuple[int, int]) -> None:
    tp, cp = size
    layouts = ranks(row, tp, cp)
    indices = np.concatenate([layout.token_index for layout in layouts])
    assert sorted(indices[indices >= 0]) == list(range(sum(row)))
    local = {len(layout.token_index) for layout in layouts}
    assert len(local) == 1 and local.pop() % tp == 0
    padded = np.diff(layouts[0].padded_cu_seqlens)
    assert (padded % (2 * cp if cp > 1 else 1) == 0).all()
    assert len(layouts[0].position_ids) == padded.sum() == sum(len(layout.token_index) for layout in layouts)
    assert len(layouts[0].position_ids) > 0


@given(lengths, sizes)
def test_tokens_by_rank_concatenates_the_ranks_tokens(row: list[int], size: tuple[int, int]) -> None:
    tp, cp = size
    layouts = ranks(row, tp, cp)
    tokens = np.concatenate([layout.local_index for layout in layouts])
    assert (tokens_by_rank(layouts[0].padded_cu_seqlens, cp) == tokens).all()


@given(lengths, sizes)
def test_positions_and_next_tokens_are_those_of_the_sequence(row: list[int], size: tuple[int, int]) -> None:
    cu = bounds(row)
    position = np.concatenate([np.arange(n) for n in row]) if row else np.zeros(0)
    ends = set(cu[1:] - 1)
    for layout in ranks(row, *size):
        for local, index in enumerate(layout.token_index):
            if index < 0:
                assert layout.next_index[local] == -1
                continue
            assert layout.position_ids[layout.local_index[local]] == position[index]
            assert layout.next_index[local] == (-1 if index in ends else index + 1)


@given(lengths, sizes, st.integers(0, 10_000))
def test_columns_predictions_and_segment_sums(row: list[int], size: tuple[int, int], seed: int) -> None:
    cu = bounds(row)
    rng = np.random.default_rng(seed)
    column = rng.normal(size=sum(row)).astype(np.float32)
    mask = rng.random(sum(row)) < 0.5
    sums = np.zeros(len(row), np.float32)
    predicted: list[int] = []
    for layout in ranks(row, *size):
        local_column = layout.take(column, 7)
        inside = layout.token_index >= 0
        assert (local_column[inside] == column[layout.token_index[inside]]).all() and (local_column[~inside] == 7).all()
        following = layout.next_token(column, 7)
        predictions = layout.predictions(mask)
        assert (following[predictions.source] == column[predictions.target]).all()
        predicted += predictions.target.tolist()
        sums += layout.segment_sum(column[predictions.target], predictions.target)
    first = np.zeros(sum(row), bool)
    first[cu[:-1]] = True
    expected_mask = mask & ~first
    assert sorted(predicted) == np.flatnonzero(expected_mask).tolist()
    expected = [column[a:b][expected_mask[a:b]].sum() for a, b in itertools.pairwise(cu)]
    np.testing.assert_allclose(sums, expected, atol=1e-5)


def test_padding_sequence_fills_up_to_tp() -> None:
    layout = token_layout(bounds([3, 2]), tp=2)
    assert layout.padded_cu_seqlens.tolist() == [0, 3, 5, 6]
    assert layout.token_index.tolist() == [0, 1, 2, 3, 4, -1]
    assert layout.next_index.tolist() == [1, 2, -1, 4, -1, -1]
    assert layout.position_ids.tolist() == [0, 1, 2, 0, 1, 0]


def test_context_parallel_ranks_hold_mirrored_chunks() -> None:
    first, second = ranks([8], 1, 2)
    assert first.token_index.tolist() == [0, 1, 6, 7]
    assert second.token_index.tolist() == [2, 3, 4, 5]
    assert first.next_index.tolist() == [1, 2, 7, -1]


@given(lengths, sizes)
def test_pieces_are_causal_attention(row: list[int], size: tuple[int, int]) -> None:
    tp, cp = size
    layouts = ranks(row, tp, cp)
    gathered = np.concatenate([layout.local_index for layout in layouts])  # padded index of each gathered key
    sequence = np.searchsorted(layouts[0].padded_cu_seqlens, np.arange(len(gathered)), side="right")
    position = layouts[0].position_ids
    for rank, layout in enumerate(layouts):
        pieces = attention_pieces(layout.padded_cu_seqlens, cp=cp, cp_rank=rank)
        keys = gathered if pieces.key_index is None else gathered[pieces.key_index]
        assert pieces.query_cu[-1] == len(layout.local_index) and pieces.key_cu[-1] == len(keys)
        for r, (queries, num_keys) in enumerate(pieces.lengths):
            for i in range(queries):
                query = layout.local_index[pieces.query_cu[r] + i]
                visible = keys[pieces.key_cu[r] : pieces.key_cu[r] + num_keys - queries + i + 1]
                assert visible.tolist() == [
                    k for k in range(len(gathered)) if sequence[k] == sequence[query] and position[k] <= position[query]
                ]


def test_pieces_balance_the_context_parallel_ranks() -> None:
    for cp in (2, 4):
        pieces = [attention_pieces(bounds([16 * cp, 8 * cp]), cp=cp, cp_rank=rank) for rank in range(cp)]
        assert len({p.key_cu[-1] for p in pieces}) == 1
        assert len({sum(q * k - q * (q - 1) // 2 for q, k in p.lengths) for p in pieces}) == 1  # unmasked scores
