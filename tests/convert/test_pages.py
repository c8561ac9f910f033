"""Migration pages: their tables match the code and name existing keys and metrics."""

from __future__ import annotations

from pathlib import Path

import pytest

from slime_like.config.schema.known import known_keys
from slime_like.metrics import dictionary
from slime_like_compat.names_elsewhere import SLIME_METRICS, VERL_METRICS
from slime_like_compat.pages import PAGES, TABLES, filled
from slime_like_compat.verl_keys import VERL_KEYS

DOCS = Path(__file__).parents[2] / "docs"


@pytest.mark.parametrize("name", PAGES)
def test_the_tables_of_a_page_match_the_code(name: str) -> None:
    page = (DOCS / name).read_text()
    assert page == filled(page), "run scripts/make_flag_docs.py"


def test_every_table_is_on_a_page() -> None:
    pages = "".join((DOCS / name).read_text() for name in PAGES)
    assert [name for name in TABLES if f"<!-- table: {name} -->" not in pages] == []
    assert filled("<!-- table: always -->\nold\n<!-- end -->").count("| `--balance-data` |") == 1


def test_names_of_other_projects_map_to_existing_names() -> None:
    assert [key for key, _ in VERL_KEYS.values() if key not in known_keys()] == []
    metrics = {entry.name for entry in dictionary.ENTRIES}
    assert {*SLIME_METRICS.values(), *VERL_METRICS.values()} - metrics == set()
