"""Sections of docs/measurements pages, each written by the script that measures it."""

from __future__ import annotations

from pathlib import Path


def replace_section(page: Path, heading: str, text: str) -> None:
    """Replace the section of ``page`` that begins with the line ``heading``, or append it; keep other sections."""
    head, present, body = page.read_text().partition(f"{heading}\n")
    next_heading = body.find("\n## ") if present else -1
    following_sections = f"\n{body[next_heading:].strip()}\n" if next_heading >= 0 else ""
    page.write_text(f"{head.rstrip()}\n\n{text.strip()}\n{following_sections}")
