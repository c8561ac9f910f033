"""Groups that do not fill a rollout."""

from __future__ import annotations

from slime_like.rollout.selection import GroupSplit, split_leftover
from slime_like.types import Status
from tests.algo.samples import SampleShape, groups_of

GROUPS = tuple(groups_of([[SampleShape((1, 1, 0, 0), 0.0, Status.COMPLETED)] * 4] * 3))


def test_complete_groups_in_order_and_leftovers_by_policy() -> None:
    assert split_leftover(GROUPS, 8, "carry") == GroupSplit(GROUPS[:2], GROUPS[2:], 0)
    assert split_leftover(GROUPS, 8, "drop") == GroupSplit(GROUPS[:2], (), 4)
    assert split_leftover(GROUPS, 12, "carry") == GroupSplit(GROUPS, (), 0)


def test_a_group_that_would_overflow_waits() -> None:
    assert split_leftover(GROUPS, 10, "carry") == GroupSplit(GROUPS[:2], GROUPS[2:], 0)


def test_too_few_groups_are_carried_or_used_by_policy() -> None:
    assert split_leftover(GROUPS, 16, "carry") == GroupSplit((), GROUPS, 0)
    assert split_leftover(GROUPS, 16, "drop") == GroupSplit(GROUPS, (), 0)
    assert split_leftover((), 16, "drop") == GroupSplit((), (), 0)


def test_a_group_larger_than_a_rollout_is_used() -> None:
    assert split_leftover(GROUPS, 3, "carry") == GroupSplit(GROUPS[:1], GROUPS[1:], 0)
