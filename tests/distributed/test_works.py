"""Tables of the hot path in C: outstanding works behave like a dict, sequence counters like itertools.count(1)."""

from __future__ import annotations

import gc
import sys
import weakref
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slime_like.distributed.wrapper import hot

module = hot.load()
pytestmark = pytest.mark.skipif(module is None, reason="no C compiler, or no headers of this Python")


class Thing:
    """Object that supports weak references."""


# Addresses like those of works: close to each other, and enough that the table grows and has collisions.
KEYS = st.integers(0, 400).map(lambda number: 0x7F0000000000 + 16 * number)
STEPS = st.lists(st.tuples(st.sampled_from(["set", "set", "set", "pop", "get"]), KEYS), max_size=600)


@given(STEPS)
def test_outstanding_works_are_kept_as_in_a_dict(steps: list[tuple[str, int]]) -> None:
    works, expected = module.Works(), dict[int, Any]()
    for index, (action, key) in enumerate(steps):
        if action == "set":
            works[key] = expected[key] = (f"ref {index}", f"counter {index}", index)
        elif action == "pop":
            assert works.pop(key, None) == expected.pop(key, None)
        else:
            assert works.get(key) == expected.get(key)
        assert (key in works, len(works)) == (key in expected, len(expected))
    assert dict(works.items()) == expected


def test_a_table_owns_its_entries_and_releases_them() -> None:
    works, value = module.Works(), Thing()
    bare = sys.getrefcount(value)
    for key in range(1000):
        works[key] = (value, value, key)
    for key in range(1000):
        works[key] = (value, None, key)
    assert sys.getrefcount(value) == bare + 1000
    for key in range(0, 1000, 2):
        works.pop(key)
    assert [key for key in range(1000) if works.get(key) is not None] == list(range(1, 1000, 2))
    assert sys.getrefcount(value) == bare + 500
    del works
    assert sys.getrefcount(value) == bare


def test_a_table_in_a_reference_cycle_is_collected() -> None:
    works, value = module.Works(), Thing()
    value.works = works  # pyright: ignore[reportAttributeAccessIssue]
    works[1] = (value, value, 1)
    reference = weakref.ref(value)
    del works, value
    gc.collect()
    assert reference() is None


def test_invalid_entries_are_refused() -> None:
    works = module.Works()
    for wrong in (None, (1, 2), (1, 2, "three")):
        with pytest.raises(TypeError):
            works[1] = wrong
    with pytest.raises(TypeError):
        works["one"] = (1, 2, 3)
    with pytest.raises(TypeError):
        del works[1]
    with pytest.raises(TypeError):
        works.get()
    assert len(works) == 0


def test_numbers_count_from_one() -> None:
    first, second = module.SequenceCounter(), module.SequenceCounter()
    assert [first() for _ in range(3)] == [1, 2, 3]
    assert second() == 1
    with pytest.raises(TypeError, match="no arguments"):
        first(1)
