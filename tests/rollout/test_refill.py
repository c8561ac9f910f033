"""Refills: dropped groups are replaced in rounds, in order, up to a bound, with unique group ids."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slime_like.config.schema.rollout import RolloutConfig
from slime_like.errors import DataError
from slime_like.interfaces import Sampling
from slime_like.rollout.collect.collector import GroupCollector
from slime_like.rollout.collect.group_filters import FilterReport
from slime_like.rollout.collect.sampler import GroupRequest
from slime_like.rollout.collect.state import GeneratedRollout
from slime_like.types import SampleGroup
from tests.rollout.counting import Counting

ROLLOUT_ID = 7


class FakeGroupSampler:
    """Fake ``GroupSampler`` and ``GroupFilters``: prompt i passes if ``passes[i % len(passes)]`` is true."""

    def __init__(self, passes: Sequence[bool], batch_size: int, max_refills: int) -> None:
        sampler: Any = self
        config = RolloutConfig(batch_size=batch_size, max_refills=max_refills)
        self.collector = GroupCollector(config, Sampling(1.0, 1), Counting(), sampler)
        self.collector._filters = sampler
        self.first_id = ROLLOUT_ID * batch_size * (1 + max_refills)
        self.rounds: list[tuple[int, int]] = []  # (number of groups in earlier rounds, number of groups)
        self._passes = passes

    async def groups(self, requests: Sequence[GroupRequest]) -> list[SampleGroup]:
        self.rounds.append((requests[0].group_id - self.first_id, len(requests)))
        return [SampleGroup(request.group_id, request.prompt, ()) for request in requests]

    def keep(self, group: SampleGroup) -> bool:
        return self._passes[group.prompt.prompt_id % len(self._passes)]

    def report(self) -> FilterReport:
        return FilterReport()


def run(passes: Sequence[bool], batch_size: int, max_refills: int) -> tuple[GeneratedRollout, FakeGroupSampler]:
    """Collect one rollout."""
    process = FakeGroupSampler(passes, batch_size, max_refills)
    return asyncio.run(process.collector.generate(ROLLOUT_ID)), process


def test_each_round_requests_the_missing_groups() -> None:
    produced, process = run([True, False], 8, 5)
    assert process.rounds == [(0, 8), (8, 4), (12, 2), (14, 1)]
    assert [group.prompt.prompt_id for group in produced.groups] == [0, 2, 4, 6, 8, 10, 12, 14]
    assert (produced.num_generated, produced.num_refills) == (15, 3)


def test_without_refills_only_passing_groups_are_returned() -> None:
    produced, process = run([False], 8, 0)
    assert (produced.groups, process.rounds) == ((), [(0, 8)])


def test_data_that_cannot_fill_a_rollout_is_named() -> None:
    words = r"rollout 7: after rollout.max_refills=3 rounds .* 0 of 32 groups .* rollout.batch_size=8 .* rollout.max_refills=0"
    with pytest.raises(DataError, match=words):
        run([False], 8, 3)


@given(
    passes=st.lists(st.booleans(), min_size=1, max_size=20), batch_size=st.integers(1, 6), max_refills=st.integers(0, 4)
)
def test_passing_groups_are_taken_in_order_within_the_range_of_ids(
    passes: list[bool], batch_size: int, max_refills: int
) -> None:
    try:
        produced, process = run(passes, batch_size, max_refills)
    except DataError:
        assert max_refills > 0 and not all(passes)
        return
    rounds = process.rounds
    assert produced.num_generated == sum(count for _, count in rounds) <= batch_size * (1 + max_refills)
    assert [start for start, _ in rounds] == [sum(c for _, c in rounds[:i]) for i in range(len(rounds))]
    passing_indices = [i for i in range(produced.num_generated) if passes[i % len(passes)]]
    assert [group.group_id - process.first_id for group in produced.groups] == passing_indices
    assert [group.prompt.prompt_id for group in produced.groups] == passing_indices
    assert max_refills == 0 or len(passing_indices) >= batch_size
