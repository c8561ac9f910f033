"""Fill the tables of docs/coming_from_slime.md and docs/coming_from_verl.md from the flag table."""

from pathlib import Path

from slime_like.convert.pages import filled

DOCS = Path(__file__).resolve().parents[1] / "docs"

for name in ("coming_from_slime.md", "coming_from_verl.md"):
    DOCS.joinpath(name).write_text(filled(DOCS.joinpath(name).read_text()))
