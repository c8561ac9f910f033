"""Store of samples in flight: copies, refusals and views."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from slime_like.errors import StoreFull
from slime_like.store.columns import PROMPT_TOKEN, TOOL_TOKEN, TokenColumns, context_columns, span_versions
from slime_like.store.store import Batch, SampleStore, StoreRow
from slime_like.types import Source, Span
from tests.store.reference import tables

NO_TOKENS = context_columns(np.zeros(0, np.int32))


def tokens(*ids: int, version: int = 3) -> TokenColumns:
    n = len(ids)
    return TokenColumns(np.array(ids, np.int32), -np.arange(1, n + 1, dtype=np.float32), np.full(n, version, np.int32))


def batch(rows: Any, columns: TokenColumns, counts: Any = None, finished: Any = None) -> Batch:
    finished = None if finished is None else np.array(finished)
    return Batch(np.array(rows), columns, None if counts is None else np.array(counts), (), finished)


def prompt(store: SampleStore, num_tokens: int = 5) -> int:
    """Return a new row with free space after its tokens."""
    row = store.add(NO_TOKENS)
    store.append_batch(Batch(np.array([row]), context_columns(np.arange(num_tokens)), np.array([num_tokens])))
    return row


@pytest.mark.parametrize("k", [1, 2, 5])
def test_k_sharers_make_k_minus_1_copies_in_one_batch(k: int) -> None:
    store = SampleStore()
    shared_row = prompt(store)
    moves, num_bytes = store.num_moves, store.nbytes
    rows = store.fork(shared_row, num_rows=k)
    assert store.nbytes == num_bytes, "forks share the memory of their row"
    store.append_batch(batch(rows, tokens(*range(k))))
    assert (store.num_clones, store.num_moves - moves) == (k - 1, 0)
    assert [store.columns(row).token_ids.tolist() for row in rows] == [[0, 1, 2, 3, 4, i] for i in range(k)]
    assert store.columns(shared_row).token_ids.tolist() == [0, 1, 2, 3, 4]
    store.append_batch(batch(rows, tokens(*range(k))))
    assert store.num_clones == k - 1, "each row has its own memory now"


def test_the_sharers_of_a_full_row_are_all_copied() -> None:
    store = SampleStore()
    shared_row = store.add(context_columns(np.arange(5)))
    rows = store.fork(shared_row, num_rows=3)
    store.release([shared_row])
    store.append_batch(batch(rows, tokens(7, 8, 9), finished=[True] * 3))
    assert (store.num_clones, store.num_moves) == (2, 1)
    assert store.nbytes == 3 * 6 * 12, "the shared tokens are released, and finished rows have no room behind them"


def test_a_fork_of_fewer_tokens_does_not_overwrite_the_others() -> None:
    store = SampleStore()
    row = prompt(store)
    (fork,) = store.fork(row, 3)
    store.append_batch(batch([fork], tokens(99)))
    assert store.columns(fork).token_ids.tolist() == [0, 1, 2, 99]
    assert store.columns(row).token_ids.tolist() == [0, 1, 2, 3, 4]
    with pytest.raises(ValueError, match="has 5 tokens"):
        store.fork(row, 6)


def test_without_memory_no_row_changes() -> None:
    """The first row has space and the others need a copy, but the check precedes the first write."""
    store = SampleStore(capacity=60)
    rows = [prompt(store), *store.fork(prompt(store), num_rows=2)]
    before = [store.columns(row).token_ids.tolist() for row in rows]
    for count in (1, 30):
        if count == 1:
            store.append_batch(batch(rows[:1], tokens(8)))
            before[0] = [*before[0], 8]
        memory = tables(store)
        experts = (np.zeros((6, 2, 4), np.uint8), None, None)
        too_large = batch(rows, tokens(*range(1 + count * 2)), counts=[1, count, count])
        for refused_batch in (too_large, replace(too_large, experts=experts)):
            with pytest.raises(StoreFull, match="n_samples_per_prompt"):
                store.append_batch(refused_batch)
        assert tables(store) == memory
        assert [store.columns(row).token_ids.tolist() for row in rows] == before
    store.append_batch(batch(rows[:1], tokens(9)))
    assert store.columns(rows[0]).token_ids.tolist() == [*before[0], 9], "and the next append continues"


@pytest.mark.parametrize(
    ("rows", "message"), [([0, 1], "finished"), ([1, 1], "twice"), ([1, 7], "not exist"), ([1, 2], "released")]
)
def test_a_refused_batch_changes_no_row(rows: list[int], message: str) -> None:
    store = SampleStore()
    for _ in range(3):
        store.add(context_columns(np.arange(2)))
    store.append_batch(batch([0], tokens(5), finished=[True]))
    store.release([2])
    with pytest.raises(ValueError, match=message):
        store.append_batch(batch(rows, tokens(1, 2)))
    assert (store.length(0), store.length(1)) == (3, 2)
    with pytest.raises(ValueError, match="3 tokens"):
        store.append_batch(batch([1], tokens(1, 2, 3)))


def test_experts_in_the_columns_of_a_batch_are_refused() -> None:
    store = SampleStore()
    row = prompt(store)
    columns = replace(tokens(7), experts=np.ones((1, 2, 4), np.uint8))
    store.append_batch(batch([row], tokens(6)))  # the next batch could be appended by one write per column
    for experts in ((), (np.zeros((6, 2, 4), np.uint8),)):
        with pytest.raises(ValueError, match=r"pass experts as Batch\.experts"):
            store.append_batch(replace(batch([row], columns), experts=experts))
    assert store.length(row) == 6


def test_experts_of_another_shape_are_refused_before_memory_is_allocated() -> None:
    store = SampleStore()
    rows, columns = np.array([prompt(store), prompt(store)]), tokens(1, 2)
    experts = [np.zeros((6, 2, top_k), np.uint8) for top_k in (4, 8)]
    before = tables(store)
    for wrong_experts, message in ((experts, "different shapes"), (experts[:1], "experts of 1 rows for 2 rows")):
        with pytest.raises(ValueError, match=message):
            store.append_batch(Batch(rows, columns, experts=wrong_experts))
    assert tables(store) == before
    store.append_batch(Batch(rows, columns, experts=experts[:1] * 2))
    with pytest.raises(ValueError, match="different shapes"):
        store.append_batch(Batch(rows, columns, experts=[experts[0].astype(np.uint16)] * 2))
    assert (store.length(0), store.length(1)) == (6, 6)


def test_an_empty_batch_changes_nothing() -> None:
    store = SampleStore()
    row = store.add(context_columns(np.arange(2)))
    store.append_batch(Batch(np.zeros(0, np.int64), NO_TOKENS))
    store.append_batch(Batch(np.array([row]), NO_TOKENS, np.array([0])))
    assert store.columns(row).token_ids.tolist() == [0, 1]


def test_columns_are_read_only_views() -> None:
    store = SampleStore()
    row = StoreRow(store, prompt(store))
    before = row.columns
    assert np.shares_memory(before.token_ids, row.columns.token_ids)
    row.append(tokens(9))
    assert np.shares_memory(before.token_ids, row.columns.token_ids), "there was room"
    with pytest.raises(ValueError, match="read-only"):
        before.token_ids[0] = 1
    row.release()
    assert before.token_ids.tolist() == [0, 1, 2, 3, 4], "a view outlives its row"
    assert store.nbytes == 0


def test_the_longest_row_that_begins_a_sequence_is_its_prefix() -> None:
    store = SampleStore()
    short, long, sibling = (store.add(context_columns(np.array(ids))) for ids in ([1, 2], [1, 2, 3], [1, 5, 3, 4]))
    assert store.longest_prefix(context_columns(np.array([1, 2, 3, 4]))) == long
    store.release([long])
    assert store.longest_prefix(context_columns(np.array([1, 2, 3, 4]))) == short
    assert store.longest_prefix(context_columns(np.array([2, 2]))) is None
    assert store.longest_prefix(context_columns(np.array([1, 5, 3, 4]))) == sibling


def test_spans_and_versions_are_the_same_information() -> None:
    spans = (
        Span(0, 3, Source.PROMPT),
        Span(3, 5, Source.MODEL, 6),
        Span(5, 7, Source.MODEL, 7),
        Span(7, 8, Source.TOOL),
    )
    versions = span_versions(spans)
    assert versions.tolist() == [PROMPT_TOKEN] * 3 + [6, 6, 7, 7, TOOL_TOKEN]
    columns = TokenColumns(np.zeros(8, np.int32), np.zeros(8, np.float32), versions)
    assert columns.spans() == spans
    assert NO_TOKENS.spans() == ()
