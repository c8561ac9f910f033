"""docs/algorithms.md: every algorithm, table entry and key is documented."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from slime_like.config.schema.known import ALGORITHMS, known_keys
from slime_like.config.schema.names import FILTERS, GROUP_ADVANTAGES, KL_ESTIMATORS, LOSSES, TOKEN_ADVANTAGES
from slime_like.config.schema.policy import AGGREGATIONS, REJECTIONS

TEXT = (Path(__file__).parents[2] / "docs" / "algorithms.md").read_text()
NAMES_IN_TEXT = set(re.findall(r"`([^`\n]+)`", TEXT))
TABLES = [ALGORITHMS, LOSSES, GROUP_ADVANTAGES, TOKEN_ADVANTAGES, KL_ESTIMATORS, FILTERS, AGGREGATIONS, REJECTIONS]


def tables(text: str) -> Iterator[list[list[str]]]:
    """Yield the cells of each block of table lines; the first two rows are header and rule."""
    for block in re.findall(r"(?:^\|.*\n)+", text + "\n", re.MULTILINE):
        yield [re.split(r"(?<!\\)\|", line)[1:-1] for line in block.splitlines()]


def is_table(rows: list[list[str]]) -> bool:
    """Return whether GitHub renders the table: a rule below the header and equally many cells in each row."""
    return len(rows) > 2 and set("".join(rows[1])) == {"-"} and len({len(row) for row in rows}) == 1


def test_every_row_belongs_to_a_table() -> None:
    assert [rows[0] for rows in tables(TEXT) if not is_table(rows)] == []
    split_table = TEXT.replace("\n| `gae` |", "\n\n| `gae` |")
    assert [rows[0][0] for rows in tables(split_table) if not is_table(rows)] == [" `gae` "]


@pytest.mark.parametrize(
    ("head", "names"),
    [
        ("`algo=`", set(ALGORITHMS)),
        ("name", {*GROUP_ADVANTAGES, *TOKEN_ADVANTAGES}),
        ("name", set(LOSSES)),
    ],
    ids=["algorithms", "advantages", "losses"],
)
def test_one_table_has_a_row_for_each(head: str, names: set[str]) -> None:
    row_names = [{row[0].strip(" `") for row in rows[2:]} for rows in tables(TEXT) if rows[0][0].strip() == head]
    assert names in row_names


@pytest.mark.parametrize("name", sorted({name for table in TABLES for name in table}))
def test_every_name_is_documented(name: str) -> None:
    assert name in NAMES_IN_TEXT, (
        f"write a row for `{name}` in docs/algorithms.md: paper, formula, keys, slime's and verl's name"
    )


@pytest.mark.parametrize("key", sorted(key for key in known_keys() if key.startswith("algo.")))
def test_every_key_is_documented(key: str) -> None:
    assert key in NAMES_IN_TEXT, f"say in docs/algorithms.md what `{key}` does, and what slime and verl call it"


def test_documented_keys_exist() -> None:
    groups = {key.partition(".")[0] for key in known_keys()}
    documented_keys = {
        name.partition("=")[0] for name in NAMES_IN_TEXT if re.fullmatch(r"[a-z]+\.[a-z_]+(=\S+)?", name)
    }
    assert sorted(key for key in documented_keys if key.partition(".")[0] in groups and key not in known_keys()) == []
