"""Numbers of things in printed lines."""

from __future__ import annotations

import pytest

from slime_like.util.counted import counted


@pytest.mark.parametrize(
    ("number", "text"), [(0, "0 free GPUs"), (1, "1 free GPU"), (2, "2 free GPUs"), (1000, "1000 free GPUs")]
)
def test_the_noun_is_singular_for_one_thing(number: int, text: str) -> None:
    assert counted(number, "free GPU") == text
    assert counted(number, "address", "addresses") == f"{number} address{'es' * (number != 1)}"
