"""Shares of several rollout managers: together they have every prompt, group and engine once, with global ids."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from slime_like.data.share import SINGLE, ManagerShare, SharedSource, share_of_source
from slime_like.metrics.types import Last
from tests.rollout.counting import Counting


@given(st.integers(1, 5), st.integers(0, 40))
def test_every_item_is_in_one_share_under_its_global_id(count: int, num_items: int) -> None:
    items = list(range(num_items))
    shares = [ManagerShare(index, count) for index in range(count)]
    assert sorted(item for share in shares for item in share.of(items)) == items
    for share in shares:
        assert [share.global_id(i) for i in range(len(share.of(items)))] == list(share.of(items))
    assert sum(share.size(num_items * count) for share in shares) == num_items * count


@given(st.integers(1, 4), st.lists(st.integers(0, 5), max_size=6))
def test_shares_take_the_prompts_of_a_single_source_in_turn(count: int, sizes: list[int]) -> None:
    sources = [SharedSource(Counting(), ManagerShare(index, count)) for index in range(count)]
    single = Counting()
    for size in sizes:
        rounds = [source.next(size) for source in sources]
        expected = [prompt.prompt_id for prompt in single.next(size * count)]
        assert [prompts[i].prompt_id for i in range(size) for prompts in rounds] == expected
    for source in sources:
        assert source.state() == single.state()
        resumed = SharedSource(Counting(), source._share)
        resumed.load_state(source.state())
        assert resumed.next(1)[0].prompt_id == source.next(1)[0].prompt_id


class BadRows(Counting):
    """Source with a metric."""

    def metrics(self) -> tuple[Last, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        return (Last("data/bad_rows", 3.0),)


def test_metrics_of_the_data_are_reported_once() -> None:
    parts = [SharedSource(BadRows(), ManagerShare(index, 2)).metrics() for index in range(2)]
    assert parts == [(Last("data/bad_rows", 3.0),), ()]


def test_a_single_manager_uses_the_source_itself() -> None:
    source = Counting()
    assert share_of_source(source, SINGLE) is source
    assert (SINGLE.name, SINGLE.file_name) == ("rollout manager", "rollout_manager")
    assert ManagerShare(1, 2).file_name == "rollout_manager_1"
