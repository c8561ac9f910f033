"""Sections of docs/measurements pages, each written by the script that measures it."""

from __future__ import annotations

from pathlib import Path


def replace_section(page: Path, heading: str, text: str) -> None:
    """Replace the section of ``page`` that begins with the line ``heading``, or append it; other sections stay as they are."""
    before, present, after = page.read_text().partition(f"{heading}\n")
    rest = after.find("\n## ") if present else -1
    following = f"\n{after[rest:].strip()}\n" if rest >= 0 else ""
    page.write_text(f"{before.rstrip()}\n\n{text.strip()}\n{following}")
