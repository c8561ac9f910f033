"""Dropped groups are replaced in rounds: in order, up to a bound, with ids that no other rollout uses."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from slime_like.errors import DataError
from slime_like.rollout.collect.refill import CollectedGroups, RefillPolicy, fill
from slime_like.types import Prompt, SampleGroup

PROMPT = Prompt(0, np.zeros(1, dtype=np.int32), "", None, None)


def run(passes: Sequence[bool], how: RefillPolicy) -> tuple[CollectedGroups, list[tuple[int, int]]]:
    """Fill a rollout in which group i passes as ``passes`` says, cyclically; return it and the requests."""
    asked: list[tuple[int, int]] = []

    async def ask(before: int, count: int) -> list[SampleGroup]:
        asked.append((before, count))
        return [SampleGroup(before + i, PROMPT, ()) for i in range(count)]

    return asyncio.run(fill(ask, lambda group: passes[group.group_id % len(passes)], how, 7)), asked


def test_as_many_as_are_missing_are_asked_for() -> None:
    filled, asked = run([True, False], RefillPolicy(8, None, 5))
    assert asked == [(0, 8), (8, 4), (12, 2), (14, 1)]
    assert [group.group_id for group in filled.groups] == [0, 2, 4, 6, 8, 10, 12, 14]
    assert (filled.num_generated, filled.num_refills) == (15, 3)


def test_rounds_of_a_given_size_may_leave_some_over() -> None:
    filled, asked = run([True, False], RefillPolicy(8, 12, 5))
    assert asked == [(0, 12), (12, 12)]
    assert len(filled.groups) == 12


def test_without_refills_what_passes_is_all_there_is() -> None:
    filled, asked = run([False], RefillPolicy(8, None, 0))
    assert (filled.groups, asked) == ((), [(0, 8)])


def test_data_that_cannot_fill_a_rollout_is_named() -> None:
    words = r"rollout 7: after rollout.max_refills=3 rounds .* 0 of 32 groups .* rollout.batch_size=8 .* rollout.max_refills=0"
    with pytest.raises(DataError, match=words):
        run([False], RefillPolicy(8, None, 3))


@given(
    passes=st.lists(st.booleans(), min_size=1, max_size=20),
    batch=st.integers(1, 6),
    extra=st.none() | st.integers(0, 5),
    refills=st.integers(0, 4),
)
def test_what_passes_is_taken_in_order_within_the_room_of_ids(
    passes: list[bool], batch: int, extra: int | None, refills: int
) -> None:
    how = RefillPolicy(batch, None if extra is None else batch + extra, refills)
    try:
        filled, asked = run(passes, how)
    except DataError:
        assert refills > 0 and not all(passes)
        return
    assert filled.num_generated == sum(count for _, count in asked) <= how.max_groups
    assert [before for before, _ in asked] == [sum(c for _, c in asked[:i]) for i in range(len(asked))]
    kept = [i for i in range(filled.num_generated) if passes[i % len(passes)]]
    assert [group.group_id for group in filled.groups] == kept
    assert refills == 0 or len(kept) >= batch
