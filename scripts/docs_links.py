"""A hook of mkdocs: links from docs/ to files of the repository outside it become the names of these files.

On a forge they lead to the source; the site does not hold it. A file that does not exist is a warning, which ``--strict``
makes an error.
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
    """``mkdocs.structure.files.File``, as far as it is used here."""

    abs_src_path: str


class Page(Protocol):
    """``mkdocs.structure.pages.Page``, as far as it is used here."""

    file: File


def on_page_markdown(markdown: str, page: Page, **_: object) -> str:
    """Return the page without links that leave docs/."""
    folder = Path(page.file.abs_src_path).parent

    def named(link: re.Match[str]) -> str:
        target = Path(os.path.normpath(folder / link[2]))
        if target.is_relative_to(ROOT / "docs"):
            return link[0]
        if not target.exists():
            logger.warning("%s links to %s, which does not exist", page.file.abs_src_path, link[2])
        return link[1]

    return LINK.sub(named, markdown)
