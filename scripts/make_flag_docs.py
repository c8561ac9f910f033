"""Write the tables of the migration pages for slime and verl, from the tables of ``slime_like_compat``."""

from pathlib import Path

from slime_like_compat.pages import PAGES, filled

DOCS = Path(__file__).resolve().parents[1] / "docs"

for name in PAGES:
    DOCS.joinpath(name).write_text(filled(DOCS.joinpath(name).read_text()))
