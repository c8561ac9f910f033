"""Types of keys as ``--help`` prints them, for annotations that are types and for annotations that are strings."""

from __future__ import annotations

from dataclasses import fields, make_dataclass
from typing import Any

import pytest

from slime_like.config.schema.known import type_of


@pytest.mark.parametrize(
    ("annotation", "text"), [(float, "float"), (float | None, "float | None"), (list[int], "list[int]"), ("int", "int")]
)
def test_a_type_is_printed_as_in_the_source(annotation: Any, text: str) -> None:
    (item,) = fields(make_dataclass("Options", [("warmth", annotation)]))
    assert type_of(item) == text
