"""Random operations on a ``SampleStore`` and on a scalar reference give the same bytes, and views never change."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from slime_like.errors import StoreFull
from slime_like.store.columns import TokenColumns
from slime_like.store.store import Batch, SampleStore
from tests.hypothesis_examples import num_examples
from tests.store.reference import BLOCKS, EXPERT_DTYPE, TOP, ScalarRow, assert_same, flat, tables

TOKENS = st.lists(
    st.tuples(st.integers(0, 99), st.sampled_from([-0.5, -2.0, float("nan")]), st.integers(-2, 5)), max_size=70
)
CAPACITY = 300  # so small that one operation in twenty finds no space


class StoreMachine(RuleBasedStateMachine):
    """State machine of a store and of one reference per row."""

    def __init__(self) -> None:
        super().__init__()
        self.store = SampleStore(CAPACITY)
        self.rows: dict[int, ScalarRow] = {}
        self.views: list[tuple[TokenColumns, TokenColumns]] = []  # (view, copy of the columns when it was taken)

    @rule(tokens=TOKENS)
    def add(self, tokens: list[tuple[int, float, int]]) -> None:
        reference = ScalarRow()
        reference.append(tokens, None)
        try:
            self.rows[self.store.add(flat(tokens))] = reference
        except StoreFull:
            assert self.store.nbytes + 12 * len(tokens) > 12 * CAPACITY

    @precondition(lambda self: self.rows)
    @rule(data=st.data(), count=st.integers(1, 4))
    def fork(self, data: st.DataObject, count: int) -> None:
        row = data.draw(st.sampled_from(sorted(self.rows)))
        size = len(self.rows[row].token_ids)
        length = data.draw(st.one_of(st.none(), st.integers(0, size)))
        for new in self.store.fork(row, length, count):
            self.rows[new] = self.rows[row].fork(size if length is None else length)

    @rule(tokens=TOKENS, count=st.integers(1, 5), has_space=st.booleans())
    def append_to_all_sharers(self, tokens: list[tuple[int, float, int]], count: int, has_space: bool) -> None:
        """Append to all forks of a row: all but one are copied, and the last moves if there is no space after it."""
        try:
            row = self.store.add(flat([] if has_space else tokens))
        except StoreFull:
            return
        rows = [row]
        try:
            if has_space:
                self.store.append_batch(Batch(np.array([row]), flat(tokens), np.array([len(tokens)])))
            rows = [*self.store.fork(row, num_rows=count)]
            self.store.release([row])
            clones, moves = self.store.num_clones, self.store.num_moves
            self.store.append_batch(Batch(np.array(rows), flat([(7, -1.0, 0)] * count)))
        except StoreFull:
            self.store.release(rows)
            return
        num_moves = 0 if has_space and tokens else 1
        assert (self.store.num_clones - clones, self.store.num_moves - moves) == (count - 1, num_moves)
        for new in rows:
            self.rows[new] = ScalarRow()
            self.rows[new].append([*tokens, (7, -1.0, 0)], None)

    @precondition(lambda self: self.rows)
    @rule(data=st.data(), routed=st.booleans())
    def append(self, data: st.DataObject, routed: bool) -> None:
        """Append to a random subset of the rows; if one of them is finished, no row may change."""
        rows = data.draw(st.lists(st.sampled_from(sorted(self.rows)), unique=True))
        tokens = [data.draw(TOKENS) for _ in rows]
        finished_flags = [data.draw(st.booleans()) for _ in rows]
        experts = [
            self._experts(data, len(self.rows[row].token_ids) + len(new)) if routed else None
            for row, new in zip(rows, tokens, strict=True)
        ]
        batch = Batch(
            np.array(rows, dtype=np.int64),
            flat([token for new in tokens for token in new]),
            np.array([len(new) for new in tokens], dtype=np.int64),
            experts if routed else (),
            np.array(finished_flags, dtype=np.bool_),
        )
        before = tables(self.store)
        try:
            self.store.append_batch(batch)
        except ValueError:
            assert any(self.rows[row].is_finished for row in rows)
            return
        except StoreFull:
            assert tables(self.store) == before
            return  # ``same_bytes`` checks that no row has changed
        assert not any(self.rows[row].is_finished for row in rows)
        for row, new, own, is_finished in zip(rows, tokens, experts, finished_flags, strict=True):
            self.rows[row].append(new, None if own is None else own.tolist())
            self.rows[row].is_finished = is_finished

    @precondition(lambda self: self.rows)
    @rule(data=st.data(), num_steps=st.integers(1, 4))
    def append_token_per_row(self, data: st.DataObject, num_steps: int) -> None:
        unfinished = [row for row, reference in sorted(self.rows.items()) if not reference.is_finished]
        if not unfinished:
            return
        rows = data.draw(st.lists(st.sampled_from(unfinished), unique=True, min_size=1))
        for step in range(num_steps):
            tokens = [(row + step, -float(row), step) for row in rows]
            try:
                self.store.append_batch(Batch(np.array(rows), flat(tokens)))
            except StoreFull:
                return
            for row, token in zip(rows, tokens, strict=True):
                self.rows[row].append([token], None)

    @precondition(lambda self: self.rows)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        row = data.draw(st.sampled_from(sorted(self.rows)))
        del self.rows[row]
        self.store.release([row])
        with pytest.raises(ValueError, match="released"):
            self.store.columns(row)

    @precondition(lambda self: self.rows)
    @rule(data=st.data())
    def keep_view(self, data: st.DataObject) -> None:
        row = data.draw(st.sampled_from(sorted(self.rows)))
        self.views.append((self.store.columns(row), self.rows[row].columns()))

    @invariant()
    def same_bytes(self) -> None:
        for row, reference in self.rows.items():
            assert_same(self.store.columns(row), reference.columns())
            assert (self.store.length(row), self.store.is_finished(row)) == (
                len(reference.token_ids),
                reference.is_finished,
            )

    @invariant()
    def views_do_not_change(self) -> None:
        for view, expected in self.views:
            assert_same(view, expected)

    @invariant()
    def memory_is_released(self) -> None:
        assert self.rows or self.store.nbytes == 0

    def _experts(self, data: st.DataObject, num_tokens: int) -> Any:
        if not data.draw(st.booleans()):
            return None
        rows = data.draw(st.integers(0, num_tokens))
        values = np.random.default_rng(num_tokens).integers(0, 9, (rows, BLOCKS, TOP))
        return values.astype(EXPERT_DTYPE)


TestStore = StoreMachine.TestCase
TestStore.settings = settings(max_examples=num_examples(30), stateful_step_count=20, deadline=None)
