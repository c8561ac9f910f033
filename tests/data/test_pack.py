"""Balancing over ranks and packing under a budget."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from slime_like.data.assemble import balance, first_fit_decreasing, pack_equal, split_to

LENGTHS = st.lists(st.integers(1, 50), min_size=1, max_size=30)


@given(lengths=LENGTHS, parts=st.integers(1, 6))
def test_balance_places_each_once_and_bounds_the_largest_part(lengths: list[int], parts: int) -> None:
    assigned = balance(lengths, parts)
    assert sorted(i for part in assigned for i in part) == list(range(len(lengths)))
    if len(lengths) >= parts:
        assert all(assigned)
    largest = max(sum(lengths[i] for i in part) for part in assigned)
    lower_bound = max(max(lengths), sum(lengths) / parts)
    assert largest <= lower_bound + max(lengths) * (parts - 1) / parts + 1e-9  # Graham's bound for any list schedule


def test_balance_by_hand() -> None:
    assert balance([5, 4, 3, 2], 2) == [[0, 3], [1, 2]]
    assert balance([7, 7], 3) == [[0], [1], []]


@given(lengths=LENGTHS, budget=st.integers(1, 60))
def test_rows_respect_the_budget_and_contain_every_sequence(lengths: list[int], budget: int) -> None:
    rows = first_fit_decreasing(lengths, budget)
    assert sorted(i for row in rows for i in row) == list(range(len(lengths)))
    for row in rows:
        assert sum(lengths[i] for i in row) <= budget or len(row) == 1
    loads = sorted(sum(lengths[i] for i in row) for row in rows)
    if len(loads) > 1:
        assert loads[0] + loads[1] > budget  # two rows that fit together would share a row


@given(lengths=LENGTHS, budget=st.integers(1, 60), dp=st.integers(1, 5))
def test_all_ranks_run_equally_many_micro_batches(lengths: list[int], budget: int, dp: int) -> None:
    rows_of_ranks = pack_equal(lengths, dp, budget)
    assert sorted(i for rank in rows_of_ranks for row in rank for i in row) == list(range(len(lengths)))
    assert len({len(rank) for rank in rows_of_ranks}) == 1
    for rank in rows_of_ranks:
        if not all(rank):  # empty rows only if no row could be split
            assert all(len(row) <= 1 for row in rank)


def test_the_largest_row_is_split() -> None:
    assert split_to([[0, 1], [2, 3]], [1, 1, 9, 1], 3) == [[0, 1], [2], [3]]
    assert split_to([[0]], [3], 2) == [[0]]
