"""docs/algorithms.md names every algorithm, every entry of the tables and every key there is."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from slime_like.config.known import ALGORITHMS, known_keys
from slime_like.config.names import FILTERS, GROUP_ADVANTAGES, KL_ESTIMATORS, LOSSES, TOKEN_ADVANTAGES
from slime_like.config.policy import AGGREGATIONS, REJECTIONS

TEXT = (Path(__file__).parents[2] / "docs" / "algorithms.md").read_text()
NAMED = set(re.findall(r"`([^`\n]+)`", TEXT))
TABLES = [ALGORITHMS, LOSSES, GROUP_ADVANTAGES, TOKEN_ADVANTAGES, KL_ESTIMATORS, FILTERS, AGGREGATIONS, REJECTIONS]


@pytest.mark.parametrize("name", sorted({name for table in TABLES for name in table}))
def test_every_name_is_documented(name: str) -> None:
    assert name in NAMED, (
        f"write a row for `{name}` in docs/algorithms.md: paper, formula, keys, slime's and verl's name"
    )


@pytest.mark.parametrize("key", sorted(key for key in known_keys() if key.startswith("algo.")))
def test_every_key_is_documented(key: str) -> None:
    assert key in NAMED, f"say in docs/algorithms.md what `{key}` does, and what slime and verl call it"


def test_no_key_is_documented_that_does_not_exist() -> None:
    groups = {key.partition(".")[0] for key in known_keys()}
    written = {name.partition("=")[0] for name in NAMED if re.fullmatch(r"[a-z]+\.[a-z_]+(=\S+)?", name)}
    assert sorted(key for key in written if key.partition(".")[0] in groups and key not in known_keys()) == []
