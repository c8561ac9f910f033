"""mkdocs hook: replace links from docs/ to other files of the repository with the link text.

On a forge these links lead to the source, which the site does not contain. A missing file gives a warning, which
``--strict`` makes an error.
"""

from __future__ import annotations

import logging
import os
import re
from pathlib import Path
from typing import Protocol

LINK = re.compile(r"\[([^\]]+)\]\((\.\./[^)#\s]+)\)")
ROOT = Path(__file__).parents[1]

logger = logging.getLogger("mkdocs.hooks.docs_links")


class File(Protocol):
    """Attributes of ``mkdocs.structure.files.File`` that the hook reads."""

    abs_src_path: str


class Page(Protocol):
    """Attributes of ``mkdocs.structure.pages.Page`` that the hook reads."""

    file: File


def on_page_markdown(markdown: str, page: Page, **_: object) -> str:
    """Return the page with the links that leave docs/ replaced by their text."""
    folder = Path(page.file.abs_src_path).parent

    def named(link: re.Match[str]) -> str:
        target = Path(os.path.normpath(folder / link[2]))
        if target.is_relative_to(ROOT / "docs"):
            return link[0]
        if not target.exists():
            logger.warning("%s links to %s, which does not exist", page.file.abs_src_path, link[2])
        return link[1]

    return LINK.sub(named, markdown)
